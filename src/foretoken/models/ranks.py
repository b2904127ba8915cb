"""The processes that hold a model's parts together: the first one leads, the others do as it says.

torchrun starts them. What the leader says goes over a group of its own, as JSON, so that waiting for it neither keeps
an accelerator busy nor runs into the time limit of a collective operation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from foretoken.core.errors import ForetokenError, InvalidRequest

LEADER = 0
_ROOM = 1024  # bytes that are always sent; longer orders follow in a second message
_LOADING = timedelta(hours=2)  # how far apart ranks may be in reading their parts
_FOREVER = timedelta(days=3650)  # an idle server has nothing to say


class Ranks:
    """One process of ``size``. device: this rank's own.

    An order that failed half-way leaves nobody knowing what the others have done, so it is the last.
    """

    def __init__(self, rank: int, size: int, device: torch.device, owned: bool) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._owned = owned  # the process group is ours to end
        self._orders = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._in_step = True

    @classmethod
    def join(cls, size: int, device: torch.device) -> Self:
        """Meet the others; every rank has to come. Raises InvalidRequest where there are not ``size`` of them."""
        given = dist.is_initialized()
        found = dist.get_world_size() if given else int(os.environ.get("WORLD_SIZE", "1"))
        if found != size:
            raise InvalidRequest(
                f"tensor_parallel_size={size} needs {size} processes and finds {found}; start them with torchrun, for "
                f"instance: torchrun --nproc-per-node {size} -m foretoken generate PROMPT --model MODEL "
                f"--tensor-parallel-size {size}"
            )
        device = _own(device)
        if not given:
            cuda = device.type == "cuda"
            dist.init_process_group(
                "nccl" if cuda else "gloo", timeout=_LOADING, device_id=device if cuda else None
            )  # fmt: skip
        return cls(dist.get_rank(), size, device, owned=not given)

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    @contextmanager
    def doing(self, order: str, **details: Any) -> Iterator[None]:
        """The leader's: have every rank do ``order`` while the leader does its own part inside."""
        if not self._in_step:
            raise ForetokenError("a pass failed on one of the ranks, so this model cannot go on; start it again")
        self._in_step = False
        self._send(json.dumps({"order": order, **details}, separators=(",", ":")).encode())
        yield
        self._in_step = True

    def hear(self) -> dict[str, Any] | None:
        """The others': wait for the next order. -> it and its details, None when there will be no more"""
        try:
            message = self._receive()
        except RuntimeError:  # the leader is gone
            return None
        return json.loads(message) if message else None

    def share(self, tensor: Tensor) -> Tensor:
        """The leader's values, written into everybody's ``tensor``."""
        dist.broadcast(tensor, LEADER)
        return tensor

    def end(self) -> None:
        """Let the others go, if they still listen, and leave. Ending twice does nothing."""
        if self.leads and self._in_step and dist.is_initialized():
            with suppress(RuntimeError):  # they are gone already
                self._send(b"")
        self.leave()

    def leave(self) -> None:
        """Go without a word; who waits for this rank sees that it is gone."""
        self._in_step = False
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()

    def _send(self, message: bytes) -> None:
        head = torch.zeros(8 + _ROOM, dtype=torch.uint8)
        body = torch.frombuffer(bytearray(len(message).to_bytes(8, "little") + message), dtype=torch.uint8)
        fits = min(len(body), len(head))
        head[:fits] = body[:fits]
        dist.broadcast(head, LEADER, group=self._orders)
        if fits < len(body):
            dist.broadcast(body[fits:].clone(), LEADER, group=self._orders)

    def _receive(self) -> bytes:
        head = torch.empty(8 + _ROOM, dtype=torch.uint8)
        dist.broadcast(head, LEADER, group=self._orders)
        received = head.numpy().tobytes()
        length, message = int.from_bytes(received[:8], "little"), received[8:]
        if length > _ROOM:
            rest = torch.empty(length - _ROOM, dtype=torch.uint8)
            dist.broadcast(rest, LEADER, group=self._orders)
            message += rest.numpy().tobytes()
        return message[:length]


def _own(device: torch.device) -> torch.device:
    """This rank's device. Raises InvalidRequest for one that transformers would not take, or that is not there."""
    accelerated = torch.cuda.is_available()
    if device != torch.device("cuda" if accelerated else "cpu"):
        usual = "cuda, one for each rank" if accelerated else "cpu"
        raise InvalidRequest(
            f"transformers divides a model among the devices of the machine ({usual}), got device={str(device)!r}; "
            "leave it out, or hide the accelerators with CUDA_VISIBLE_DEVICES="
        )
    if not accelerated:
        return device
    local, known = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= known:
        raise InvalidRequest(f"rank {local} of this machine has no device of its own: torch finds {known}; use fewer")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
