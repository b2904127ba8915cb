"""A causal model of transformers whose matrices are divided among processes: tensor parallelism.

transformers says how (``base_model_tp_plan``) and every rank reads its own part of the checkpoint. The first rank alone
has an engine, a draft and a controller; the others do their part of its passes and decide nothing. So no clock, random
number or rounding of theirs can make ranks disagree.
"""

from __future__ import annotations

import importlib.util
import signal
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import ForetokenError, ModelLoadError
from foretoken.models.hf import HFModel, read_module
from foretoken.models.memory import check_fits, weight_bytes
from foretoken.models.module_checks import one_line
from foretoken.models.ranks import Ranks
from foretoken.models.slots import Placement


class ShardedModel(HFModel):
    """See the module. ``row_bytes`` are those of this rank."""

    def __init__(self, module: Any, ranks: Ranks, max_length: int | None = None) -> None:
        self._ranks = ranks
        super().__init__(module, max_length)

    @classmethod
    def join(
        cls, path: Path, dtype: torch.dtype, device: torch.device, size: int,
        shapes: Mapping[str, tuple[int, ...]], max_length: int | None = None,
    ) -> Self:  # fmt: skip
        """Read this rank's part of a checkpoint with tensors of these shapes. -> on the first of ``size`` ranks, the
        model

        On the others this does their part until the first one ends, and then raises SystemExit. Raises InvalidRequest
        without such ranks, ModelLoadError for a model that cannot be divided so.
        """
        ranks = Ranks.join(size, device)
        try:
            part = size if device.type == "cuda" else 1  # ranks on CPUs share one memory
            check_fits(weight_bytes(shapes, dtype, int8=False) // part, ranks.device, str(path))
            model = cls(_read_part(path, dtype, size), ranks, max_length)
        except BaseException:
            ranks.leave()
            raise
        if not ranks.leads:
            model.follow()
            raise SystemExit(0)
        weakref.finalize(model, ranks.end)
        return model

    def follow(self) -> None:
        """Do what the first rank says until it ends, signals to the whole group notwithstanding: it decides when."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        while (order := self._ranks.hear()) is not None:
            try:
                self._obey(order)
            except RuntimeError as error:
                message = f"rank {self._ranks.rank} could not do its part of a pass: {one_line(error)}"
                raise ForetokenError(message) from error
        self._ranks.end()

    @property
    def row_bytes(self) -> int:
        return self._slots.row_bytes

    @torch.inference_mode()
    def unembed(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self.device, self.dtype).contiguous()
        with self._ranks.doing("unembed", rows=hidden.shape[0]):
            return super().unembed(self._ranks.share(hidden))

    # the leader's part, the others told of it

    def _pass(self, place: Placement, taps: Sequence[int]) -> Any:
        with self._ranks.doing("pass", place=_written(place), used=self._slots.used):
            return super()._pass(place, taps)

    def plain(self, texts: Tensor) -> Tensor:
        with self._ranks.doing("plain", texts=texts.tolist()):
            return super().plain(texts)

    def _move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        if list(sources) == list(range(destination, destination + len(sources))):
            return
        with self._ranks.doing("move", slot=slot, destination=destination, sources=list(sources)):
            super()._move(slot, destination, sources)

    def _check_once(self, max_length: int) -> None:
        if self._ranks.leads:
            super()._check_once(max_length)

    # the others' part

    @torch.inference_mode()
    def _obey(self, order: dict[str, Any]) -> None:
        if order["order"] == "pass":
            self._slots.used = order["used"]
            super()._pass(_read(order["place"]), ())
        elif order["order"] == "plain":
            super().plain(torch.tensor(order["texts"]))
        elif order["order"] == "move":
            super()._move(order["slot"], order["destination"], order["sources"])
        else:
            hidden = torch.empty(order["rows"], self.hidden_size, dtype=self.dtype, device=self.device)
            super().unembed(self._ranks.share(hidden))


def _read_part(path: Path, dtype: torch.dtype, size: int) -> Any:
    """This rank's part of the module. Raises ModelLoadError."""
    from transformers import AutoConfig
    from transformers.distributed import DistributedConfig

    if importlib.util.find_spec("accelerate") is None:
        raise ModelLoadError(
            "transformers divides models with accelerate, which is missing; pip install 'foretoken[parallel]'"
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    except (ValueError, KeyError, OSError) as error:
        raise ModelLoadError(f"transformers cannot load the model in {path}: {one_line(error)}") from error
    if not getattr(config, "base_model_tp_plan", None):
        raise ModelLoadError(
            f"transformers has no tensor-parallel plan for the type {config.model_type!r} of {path}; "
            "leave tensor_parallel_size out"
        )
    heads = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    for name, count in heads.items():
        if isinstance(count, int) and count % size:
            raise ModelLoadError(
                f"{path} has {name}={count}, which {size} ranks cannot share evenly; "
                f"tensor_parallel_size must divide {' and '.join(str(n) for n in heads.values() if n)}"
            )
    return read_module(path, dtype, distributed_config=DistributedConfig(tp_size=size, tp_plan="auto")).eval()


def _written(place: Placement) -> dict[str, Any]:
    """A placement as JSON has it; of drafts the tree, which is all that a pass needs."""
    return {
        "tokens": place.tokens.tolist(), "positions": place.positions.tolist(), "slots": place.slots,
        "firsts": place.firsts, "counts": place.counts, "lengths": place.lengths, "roots": place.roots,
        "drafts": [[draft.ids, draft.parents] for draft in place.drafts],
    }  # fmt: skip


def _read(written: dict[str, Any]) -> Placement:
    lists = {name: tuple(written[name]) for name in ("slots", "firsts", "counts", "lengths", "roots")}
    drafts = (Draft(torch.tensor(ids, dtype=torch.int64), tuple(parents)) for ids, parents in written["drafts"])
    tokens, positions = torch.tensor(written["tokens"]), torch.tensor(written["positions"])
    return Placement(tokens=tokens, positions=positions, drafts=tuple(drafts), **lists)
