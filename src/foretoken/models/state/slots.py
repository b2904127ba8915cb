"""The KV cache for transformers modules: a slot per sequence, behind the cache interface of transformers."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from foretoken.models.state.kv import finite
from foretoken.models.state.pages import SlotCache
from foretoken.models.state.replay import Rows


class Slots(SlotCache):
    """The slots of all layers.

    Attributes:
        used: largest number of slots in use at once.
        size: slots of the buffers.
        rows: rows of each slot of the buffers.
        parts: the rows of each sequence in the current pass, inside ``serving``.
        index: slots and rows that the current pass writes, [B, 1] and [B, width].
    """

    def __init__(self) -> None:
        self._layers: list[SlotLayer] = []
        self._free: list[int] = []
        self.used = 0
        self.size, self.rows = 0, 0
        self.parts: Sequence[Rows] = ()
        self.index: tuple[Tensor, Tensor] | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers that were written to."""
        buffers = [b for layer in self._layers for b in (layer.keys, layer.values) if b is not None]
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in buffers)

    def new_layer(self) -> SlotLayer:
        """Adds a layer. Returns its cache."""
        layer = SlotLayer(self)
        self._layers.append(layer)
        return layer

    @property
    def reach(self) -> int:
        """The highest row of the current pass, plus one: the number of keys that it reads."""
        return max(part.first + part.count for part in self.parts)

    def acquire(self, tokens: Sequence[int] = (), scope: Hashable = None) -> tuple[int, int]:
        if self._free:
            return heapq.heappop(self._free), 0
        self.used += 1
        return self.used - 1, 0

    def release(self, number: int) -> None:
        heapq.heappush(self._free, number)

    def nbytes(self) -> int:
        buffers = [b for layer in self._layers for b in (layer.keys, layer.values) if b is not None]
        return sum(buffer.nbytes for buffer in buffers)

    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        """Moves rows ``sources`` to ``destination`` onward, in order: the accepted path of a draft tree."""
        if list(sources) == list(range(destination, destination + len(sources))):
            return
        for layer in self._layers:
            for buffer in (layer.keys, layer.values):
                if buffer is not None:
                    index = torch.tensor(sources, device=buffer.device)
                    buffer[slot, :, destination : destination + len(sources)] = buffer[slot].index_select(1, index)

    @contextmanager
    def serving(self, parts: Sequence[Rows], device: torch.device) -> Iterator[None]:
        """Context manager: layers that are updated inside write and read the rows of a padded pass.

        Padding is computed and written past a sequence's end, and no row attends to it.
        """
        while self.size < self.used:
            self.size = max(1, 2 * self.size)
        firsts, width = torch.tensor([part.first for part in parts]), max(part.count for part in parts)
        needed = int(firsts.max()) + width
        if needed > self.rows:
            self.rows = max(needed, 2 * self.rows, 64)
        slots, rows = torch.tensor([part.slot for part in parts])[:, None], firsts[:, None] + torch.arange(width)
        self.index, self.parts = (slots.to(device), rows.to(device)), parts
        try:
            yield
        finally:
            self.parts, self.index = (), None


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, each [slots, kv_heads, rows, head_dim].

    They start as zeros and stay finite, because 0 times a masked row must be 0.
    """

    is_sliding = False
    keys: Tensor | None
    values: Tensor | None

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: buffers are allocated when they are first written."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the rows of the pass, [B, kv_heads, width, head_dim]; returns all keys and values that it reads."""
        self.keys, self.values = self._fit(self.keys, key_states), self._fit(self.values, value_states)
        index = self._slots.index
        if index is None:
            raise RuntimeError("this cache belongs to a foretoken model and is used outside of its pass")
        slots, rows = (part.to(key_states.device) for part in index)
        self.keys[slots, :, rows] = finite(key_states).transpose(1, 2)
        self.values[slots, :, rows] = finite(value_states).transpose(1, 2)
        return self._read(self.keys), self._read(self.values)

    def _read(self, buffer: Tensor) -> Tensor:
        slots, reach = [part.slot for part in self._slots.parts], self._slots.reach
        low = slots[0]
        if slots == list(range(low, low + len(slots))):
            return buffer[low : low + len(slots), :, :reach]
        return buffer[slots, :, :reach]

    def _fit(self, buffer: Tensor | None, states: Tensor) -> Tensor:
        """Returns the buffer, grown if it has fewer slots or rows than needed."""
        size, rows = self._slots.size, self._slots.rows
        if buffer is not None and buffer.shape[0] >= size and buffer.shape[2] >= rows:
            return buffer
        fresh = states.new_zeros(size, states.shape[1], rows, states.shape[3])
        if buffer is not None:
            fresh[: buffer.shape[0], :, : buffer.shape[2]] = buffer
        return fresh

    def get_seq_length(self) -> int:
        parts = self._slots.parts
        return self._slots.reach - max(part.count for part in parts) if parts else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots.reach if self._slots.parts else query_length, 0

    def get_max_length(self) -> int:
        return -1
