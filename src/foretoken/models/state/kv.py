"""A KV cache in slots: one buffer per layer with a slot for each sequence, grown in buckets."""

import heapq
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from foretoken.models.state.pages import SlotCache

BUCKET = 128  # the rows of a buffer are a multiple of this


def padded(rows: int, bucket: int = BUCKET) -> int:
    return -(-rows // bucket) * bucket


def finite(states: Tensor) -> Tensor:
    """Returns keys or values with 0 in place of NaN and infinity.

    A masked key has weight 0, and 0 times infinity is NaN: without this, a value that overflows in one row would reach
    rows that do not attend to it.
    """
    return states.nan_to_num(0.0, 0.0, 0.0)


class KVCache(SlotCache):
    """Keys and values of all sequences: two tensors [slots, kv_heads, rows, head_dim] per layer.

    Args:
        shapes: heads of keys and values, and the width of a head, of each layer; None for a layer that reads another
            layer's, whose buffers are empty.
        dtype: dtype of the buffers.
        device: device of the buffers.

    The row of a sequence's token i is row i of its slot. Buffers start as zeros and hold only finite numbers, because a
    masked row has weight 0, and 0 times its content must be 0.
    """

    def __init__(self, shapes: Sequence[tuple[int, int] | None], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = [shape or (0, 0) for shape in shapes]
        self._dtype, self._device = dtype, device
        self.slots, self.rows = 0, 0
        self.keys: list[Tensor] = [self._buffer(layer, 0, 0) for layer in range(len(shapes))]
        self.values: list[Tensor] = [self._buffer(layer, 0, 0) for layer in range(len(shapes))]
        self._free: list[int] = []

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * sum(kv_heads * head_dim for kv_heads, head_dim in self._shapes) * self._dtype.itemsize

    def acquire(self, tokens: Sequence[int] = (), scope: Hashable = None) -> tuple[int, int]:
        if not self._free:
            slots = max(1, self.slots * 2)
            self._resize(slots, self.rows)
            self._free = list(range(self.slots, slots))
            self.slots = slots
        return heapq.heappop(self._free), 0

    def release(self, number: int) -> None:
        heapq.heappush(self._free, number)

    def reserve(self, rows: int) -> None:
        """Grows every slot to at least ``rows`` rows, by doubling, so that copies are rare."""
        if rows > self.rows:
            target = padded(max(rows, 2 * self.rows, 256))
            self._resize(self.slots, target)
            self.rows = target

    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        """Moves rows ``sources`` to ``destination`` onward, in order: the accepted path of a draft tree."""
        if list(sources) == list(range(destination, destination + len(sources))):
            return
        pinned = self._device.type == "cuda"  # an asynchronous copy to the device needs pinned memory
        index = torch.tensor(sources, pin_memory=pinned).to(self._device, non_blocking=True)
        for buffer in (*self.keys, *self.values):
            buffer[slot, :, destination : destination + len(sources)] = buffer[slot].index_select(1, index)

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def _buffer(self, layer: int, slots: int, rows: int) -> Tensor:
        kv_heads, head_dim = self._shapes[layer]
        return torch.zeros(slots, kv_heads, rows, head_dim, dtype=self._dtype, device=self._device)

    def _resize(self, slots: int, rows: int) -> None:
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                fresh = self._buffer(layer, slots, rows)
                fresh[: old.shape[0], :, : old.shape[2]] = old
                buffers[layer] = fresh
