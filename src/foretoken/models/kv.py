"""Keys and values of all open sequences: static buffers in slots, grown in buckets."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

BUCKET = 128  # buffers hold a multiple of this many rows


def padded(rows: int, bucket: int = BUCKET) -> int:
    """``rows`` rounded up to a multiple of ``bucket``."""
    return -(-rows // bucket) * bucket


def finite(states: Tensor) -> Tensor:
    """Keys or values for a cache, with 0 in place of NaN and infinity.

    A masked key has weight 0, and 0 times infinity is NaN: a value that overflows in one row must not reach rows that
    do not attend to it.
    """
    return states.nan_to_num(0.0, 0.0, 0.0)


class KVCache:
    """Per layer two tensors [slots, kv_heads, rows, head_dim]; a sequence's rows lie in its slot from 0 on.

    Buffers start as zeros and hold finite numbers: a masked row has weight 0, and 0 times leftover memory must be 0.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (kv_heads, head_dim)
        self._dtype, self._device = dtype, device
        self.slots, self.rows = 0, 0
        self.keys: list[Tensor] = [self._buffer(0, 0) for _ in range(layers)]
        self.values: list[Tensor] = [self._buffer(0, 0) for _ in range(layers)]
        self._free: list[int] = []

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows in all layers."""
        kv_heads, head_dim = self._shape
        return 2 * len(self.keys) * kv_heads * head_dim * self._dtype.itemsize

    def acquire(self) -> int:
        """The lowest free slot; low slots keep the batch dense."""
        if not self._free:
            slots = max(1, self.slots * 2)
            self._resize(slots, self.rows)
            self._free = list(range(self.slots, slots))
            self.slots = slots
        return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def reserve(self, rows: int) -> None:
        """Room for ``rows`` rows in every slot; grows by doubling, so that copies are rare."""
        if rows > self.rows:
            target = padded(max(rows, 2 * self.rows, 256))
            self._resize(self.slots, target)
            self.rows = target

    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        """Bring rows ``sources`` to ``destination`` onward, in order; used after a tree's verdict."""
        if list(sources) == list(range(destination, destination + len(sources))):
            return
        pinned = self._device.type == "cuda"  # the copy to the device is then not waited for
        index = torch.tensor(sources, pin_memory=pinned).to(self._device, non_blocking=True)
        for buffer in (*self.keys, *self.values):
            buffer[slot, :, destination : destination + len(sources)] = buffer[slot].index_select(1, index)

    def nbytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def _buffer(self, slots: int, rows: int) -> Tensor:
        kv_heads, head_dim = self._shape
        return torch.zeros(slots, kv_heads, rows, head_dim, dtype=self._dtype, device=self._device)

    def _resize(self, slots: int, rows: int) -> None:
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                fresh = self._buffer(slots, rows)
                fresh[: old.shape[0], :, : old.shape[2]] = old
                buffers[layer] = fresh
