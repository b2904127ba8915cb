"""Tensor parallelism: a causal model of transformers whose matrices are divided among processes.

transformers defines the division (``base_model_tp_plan``), and every rank reads its part of the checkpoint. Only
the first rank has an engine, a draft and a controller. The other ranks compute their part of its passes and make no
decisions, so differences of clocks, random numbers or rounding cannot make ranks disagree.

torchrun starts the processes (ranks). The first one is the leader, the others follow its orders: JSON over a separate
process group, so waiting for an order neither keeps an accelerator busy nor hits the timeout of a collective operation.
"""

import importlib.util
import json
import os
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import ForetokenError, InvalidRequest, ModelLoadError
from foretoken.models.formats.memory import check_fits, weight_bytes
from foretoken.models.hf.model import HFModel
from foretoken.models.hf.probe import one_line, read_module
from foretoken.models.hf.runner import HFRunner
from foretoken.models.runners.pass_plan import Part, PassPlan

LEADER = 0
_FIRST_BYTES = 1024  # bytes of an order; the remainder of a longer one follows in a second message
_LOADING = timedelta(hours=2)  # maximum difference between ranks in loading their parts
_FOREVER = timedelta(days=3650)  # an idle server sends no orders


class RankGroup:
    """This process among all ranks.

    After an order that failed, the state of the other ranks is unknown, so no further orders are sent.
    owned: whether this object destroys the process group at the end.
    """

    def __init__(self, rank: int, size: int, device: torch.device, owned: bool) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._owned = owned
        self._orders = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._in_step = True

    @classmethod
    def join(cls, size: int, device: torch.device) -> Self:
        """Joins the group; blocks until every rank has joined.

        Raises InvalidRequest if there are not ``size`` processes, or the device is not this rank's.
        """
        initialized = dist.is_initialized()
        world_size = dist.get_world_size() if initialized else int(os.environ.get("WORLD_SIZE", "1"))
        if world_size != size:
            raise InvalidRequest(
                f"tensor_parallel_size={size} needs {size} processes and finds {world_size}; start them with torchrun, "
                f"for instance: torchrun --nproc-per-node {size} -m foretoken generate PROMPT -m MODEL "
                f"--tensor-parallel-size {size}"
            )
        device = _device_of_rank(device)
        if not initialized:
            cuda = device.type == "cuda"
            backend, device_id = ("nccl", device) if cuda else ("gloo", None)
            dist.init_process_group(backend, timeout=_LOADING, device_id=device_id)
        return cls(dist.get_rank(), size, device, owned=not initialized)

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    @contextmanager
    def doing(self, order: str, **details: Any) -> Iterator[None]:
        """Context manager of the leader: sends ``order`` to the other ranks. The leader's part runs inside.

        Raises ForetokenError if an earlier order failed.
        """
        if not self._in_step:
            raise ForetokenError("a pass failed on one of the ranks, so this model cannot continue; start it again")
        self._in_step = False
        self._send(json.dumps({"order": order, **details}, separators=(",", ":")).encode())
        yield
        self._in_step = True

    def receive(self) -> dict[str, Any] | None:
        """Waits for the leader's next order. Returns it with its details; None if it has left."""
        try:
            message = self._receive()
        except RuntimeError:  # the leader has left
            return None
        return json.loads(message) if message else None

    def share(self, tensor: Tensor) -> Tensor:
        """Broadcasts the leader's values into ``tensor`` on every rank. Returns it."""
        dist.broadcast(tensor, LEADER)
        return tensor

    def end(self) -> None:
        """Orders the other ranks to end, and leaves the group. Ending twice does nothing."""
        if self.leads and self._in_step and dist.is_initialized():
            with suppress(RuntimeError):  # they have left already
                self._send(b"")
        self.leave()

    def leave(self) -> None:
        """Leaves the group without a message; ranks that wait for this one get an error."""
        self._in_step = False
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()

    def _send(self, message: bytes) -> None:
        head = torch.zeros(8 + _FIRST_BYTES, dtype=torch.uint8)
        body = torch.frombuffer(bytearray(len(message).to_bytes(8, "little") + message), dtype=torch.uint8)
        fits = min(len(body), len(head))
        head[:fits] = body[:fits]
        dist.broadcast(head, LEADER, group=self._orders)
        if fits < len(body):
            dist.broadcast(body[fits:].clone(), LEADER, group=self._orders)

    def _receive(self) -> bytes:
        head = torch.empty(8 + _FIRST_BYTES, dtype=torch.uint8)
        dist.broadcast(head, LEADER, group=self._orders)
        received = head.numpy().tobytes()
        length, message = int.from_bytes(received[:8], "little"), received[8:]
        if length > _FIRST_BYTES:
            remainder = torch.empty(length - _FIRST_BYTES, dtype=torch.uint8)
            dist.broadcast(remainder, LEADER, group=self._orders)
            message += remainder.numpy().tobytes()
        return message[:length]


def _device_of_rank(device: torch.device) -> torch.device:
    """Returns this rank's device. Raises InvalidRequest for one that transformers would not use, or that is missing."""
    accelerated = torch.cuda.is_available()
    if device != torch.device("cuda" if accelerated else "cpu"):
        usual = "cuda, one for each rank" if accelerated else "cpu"
        raise InvalidRequest(
            f"transformers divides a model among the devices of the machine ({usual}), got device={str(device)!r}; "
            "leave it out, or hide the accelerators with CUDA_VISIBLE_DEVICES="
        )
    if not accelerated:
        return device
    local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= devices:
        raise InvalidRequest(f"rank {local} of this machine has no device of its own: torch finds {devices}; use fewer")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


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
        device: torch.device,  # type of device
        size: int,
        shapes: Mapping[str, tuple[int, ...]],  # shapes of the checkpoint's tensors
        max_length: int | None = None,  # maximum length of a sequence in tokens; None for the module's
    ) -> Self:
        """Loads this rank's part of a checkpoint. Returns on the first rank only.

        The other ranks follow the first one's orders until it ends.

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
