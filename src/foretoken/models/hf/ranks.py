"""The processes (ranks) that share a model: the first one is the leader, the others follow its orders.

torchrun starts them. Orders are JSON over a separate process group, so waiting for an order neither keeps an
accelerator busy nor hits the timeout of a collective operation.
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
_FIRST_BYTES = 1024  # bytes of an order; the remainder of a longer one follows in a second message
_LOADING = timedelta(hours=2)  # maximum difference between ranks in loading their parts
_FOREVER = timedelta(days=3650)  # an idle server sends no orders


class RankGroup:
    """This process among all ranks.

    After an order that failed, the state of the other ranks is unknown, so no further orders are sent.

    Args:
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
        """Whether this rank is the leader."""
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
