"""Tensor parallelism: a causal model of transformers whose matrices are divided among processes.

transformers defines the division (``base_model_tp_plan``), and every rank reads its part of the checkpoint. Only
the first rank has an engine, a draft and a controller. The other ranks compute their part of its passes and make no
decisions, so differences of clocks, random numbers or rounding cannot make ranks disagree.
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
from foretoken.models.formats.memory import check_fits, weight_bytes
from foretoken.models.hf.model import HFModel
from foretoken.models.hf.modules import one_line, read_module
from foretoken.models.hf.ranks import RankGroup
from foretoken.models.hf.runner import HFRunner
from foretoken.models.runners.pass_plan import Part, PassPlan


class ShardedRunner(HFRunner):
    """One rank's part of a module. ``kv_bytes_per_token`` counts this rank's part alone.

    Args:
        module: this rank's part of the module.
        max_length: maximum length of a sequence in tokens.
        ranks: the group of ranks.
    """

    def __init__(self, module: Any, max_length: int, ranks: RankGroup) -> None:
        super().__init__(module, max_length)
        self._ranks = ranks

    @property
    def kv_bytes_per_token(self) -> int:
        return self._pages.kv_bytes_per_token

    # the leader's part, with orders to the others

    @torch.inference_mode()
    def unembed(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self.module.device, self.module.dtype).contiguous()
        with self._ranks.doing("unembed", shape=list(hidden.shape)):
            return super().unembed(self._ranks.share(hidden))

    def compute(self, plan: PassPlan, states: bool) -> Any:
        with self._ranks.doing("pass", plan=plan_to_json(plan), used=self._pages.used):
            return super().compute(plan, states)

    def plain(self, texts: Tensor) -> Tensor:
        with self._ranks.doing("plain", texts=texts.tolist()):
            return super().plain(texts)

    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        if list(sources) == list(range(destination, destination + len(sources))):
            return
        with self._ranks.doing("move", slot=slot, destination=destination, sources=list(sources)):
            super().move(slot, destination, sources)

    @torch.inference_mode()
    def obey(self, order: dict[str, Any]) -> None:
        """Computes this rank's part of an order, on the ranks other than the leader."""
        if order["order"] == "pass":
            self._pages.used = order["used"]
            super().compute(plan_from_json(order["plan"]), False)
        elif order["order"] == "plain":
            super().plain(torch.tensor(order["texts"]))
        elif order["order"] == "move":
            super().move(order["slot"], order["destination"], order["sources"])
        else:
            hidden = torch.empty(order["shape"], dtype=self.module.dtype, device=self.module.device)
            super().unembed(self._ranks.share(hidden))


class ShardedModel(HFModel):
    """One rank's part of a model.

    Args:
        module: this rank's part of the module.
        ranks: the group of ranks.
        max_length: maximum length of a sequence in tokens; None for the module's.
    """

    runner: ShardedRunner

    def __init__(self, module: Any, ranks: RankGroup, max_length: int | None = None) -> None:
        self._ranks = ranks
        super().__init__(module, max_length)

    def _new_runner(self, module: Any, max_length: int) -> ShardedRunner:
        return ShardedRunner(module, max_length, self._ranks)

    def _check_once(self, max_length: int) -> None:
        if self._ranks.leads:
            super()._check_once(max_length)

    @classmethod
    def join(
        cls,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        size: int,
        shapes: Mapping[str, tuple[int, ...]],
        max_length: int | None = None,
    ) -> Self:
        """Loads this rank's part of a checkpoint. Returns on the first rank only.

        The other ranks follow the first one's orders until it ends.

        Args:
            device: type of device.
            shapes: shapes of the checkpoint's tensors.
            max_length: maximum length of a sequence in tokens; None for the module's.

        Raises:
            SystemExit: on the other ranks, once the first one has ended.
            InvalidRequest: there are not ``size`` ranks.
            ModelLoadError: the model cannot be divided among ``size`` ranks.
        """
        ranks = RankGroup.join(size, device)
        try:
            part = size if device.type == "cuda" else 1  # ranks on CPUs share one memory
            check_fits(weight_bytes(shapes, dtype, bits=None) // part, ranks.device, str(path))
            model = cls(read_part(path, dtype, size), ranks, max_length)
        except BaseException:
            ranks.leave()
            raise
        if not ranks.leads:
            model.follow()
            raise SystemExit(0)
        weakref.finalize(model, ranks.end)
        return model

    def follow(self) -> None:
        """Follows the first rank's orders until it ends.

        Signals to the whole process group are ignored, because the first rank decides when to end. Raises
        ForetokenError if this rank's part of an order failed.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        while (order := self._ranks.receive()) is not None:
            try:
                self.runner.obey(order)
            except RuntimeError as error:
                message = f"rank {self._ranks.rank} could not do its part of a pass: {one_line(error)}"
                raise ForetokenError(message) from error
        self._ranks.end()


def read_part(path: Path, dtype: torch.dtype, size: int) -> Any:
    """Loads this rank's part of a module.

    Raises ModelLoadError if accelerate is missing, or transformers cannot divide the model among ``size`` ranks.
    """
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


def plan_to_json(plan: PassPlan) -> dict[str, Any]:
    """Returns a plan as JSON values. A draft is reduced to its tree, which is enough for a pass."""
    parts = [(p.slot, p.first, p.count, p.nodes_at, p.draft.ids, p.draft.parents) for p in plan.parts]
    return {"tokens": plan.tokens, "positions": plan.positions, "counts": plan.output_counts, "parts": parts}


def plan_from_json(written: dict[str, Any]) -> PassPlan:
    parts = [
        Part(slot, first, count, nodes_at, Draft.tree(ids, parents))
        for slot, first, count, nodes_at, ids, parents in written["parts"]
    ]
    reach = max(part.end for part in parts)
    return PassPlan(written["tokens"], written["positions"], parts, [], written["counts"], reach)
