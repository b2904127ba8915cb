"""The KV cache for transformers modules: a slot per sequence, behind the cache interface of transformers."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.state.kv import finite


@dataclass(frozen=True)
class Placement:
    """The layout of one padded pass: sequence b's row i goes to row ``firsts[b] + i`` of slot ``slots[b]``.

    Rows from ``counts[b]`` on are padding: they are computed and written past the sequence's end, and no row attends to
    them.
    """

    tokens: Tensor  # [B, width]
    positions: Tensor  # [B, width]
    slots: tuple[int, ...]
    firsts: tuple[int, ...]
    counts: tuple[int, ...]
    lengths: tuple[int, ...]  # committed tokens; draft node 0 lies in the row after them
    roots: tuple[int, ...]  # the first row whose logits are needed
    drafts: tuple[Draft, ...]

    @staticmethod
    def of(handles: Sequence[Handle], drafts: Sequence[Draft], done: Sequence[int]) -> Placement:
        """Returns the pass over all pending tokens and the draft nodes from ``done[b]`` on."""
        rows, positions, firsts, roots = [], [], [], []
        for handle, draft, start in zip(handles, drafts, done, strict=True):
            length, pending = len(handle.tokens), handle.pending
            rows.append([*pending, *draft.ids[start:]])
            positions.append([*range(handle.cached, length), *(length - 1 + d for d in draft.depths[start:])])
            firsts.append(handle.cached if pending else length + start)
            roots.append(max(0, len(pending) - 1))
        width = max(map(len, rows))
        return Placement(
            tokens=torch.tensor([r + [0] * (width - len(r)) for r in rows]),
            positions=torch.tensor([p + [0] * (width - len(p)) for p in positions]),
            slots=tuple(h.slot for h in handles),
            firsts=tuple(firsts),
            counts=tuple(map(len, rows)),
            lengths=tuple(len(h.tokens) for h in handles),
            roots=tuple(roots),
            drafts=tuple(drafts),
        )

    @property
    def width(self) -> int:
        """Rows per sequence, padding included."""
        return self.tokens.shape[1]

    @property
    def reach(self) -> int:
        """The highest row in use, plus one: the number of keys that a pass reads."""
        return max(first + count for first, count in zip(self.firsts, self.counts, strict=True))

    def visible(self, window: int = 0) -> Tensor:
        """Returns the keys that each row attends to, bool [B, width, reach].

        Args:
            window: length of the attention window in positions; 0 for no window.
        """
        keys = torch.arange(self.reach)
        rows = torch.tensor(self.firsts)[:, None] + torch.arange(self.width)
        mask = keys <= rows[:, :, None]
        for at, draft in enumerate(self.drafts):
            if draft.is_chain:
                continue
            start, end = self.lengths[at], self.lengths[at] + len(draft)
            skipped = max(0, self.firsts[at] - start)
            row = max(0, start - self.firsts[at])
            mask[at, row : self.counts[at], start:end] = draft.ancestors[skipped:]
        if window:
            mask &= self._key_positions()[:, None, :] > self.positions[:, :, None] - window
            mask[..., 0] |= ~mask.any(-1)  # a padded row needs a key
        return mask

    def _key_positions(self) -> Tensor:
        """Returns the position of every key [B, reach]; a draft node's follows from its depth."""
        positions = torch.arange(self.reach).repeat(len(self.slots), 1)
        for at, draft in enumerate(self.drafts):
            if not draft.is_chain:
                start = self.lengths[at]
                positions[at, start : start + len(draft)] = torch.tensor(draft.depths) + start - 1
        return positions


class Slots:
    """The slots of all layers.

    Attributes:
        used: largest number of slots in use at once.
        size: slots of the buffers.
        rows: rows of each slot of the buffers.
        place: the layout of the current pass, inside ``serving``.
        index: slots and rows that the current pass writes.
    """

    def __init__(self) -> None:
        self._layers: list[SlotLayer] = []
        self._free: list[int] = []
        self.used = 0
        self.size, self.rows = 0, 0
        self.place: Placement | None = None
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

    def acquire(self) -> int:
        """Takes the lowest free slot; adjacent slots are read without a copy."""
        if self._free:
            return heapq.heappop(self._free)
        self.used += 1
        return self.used - 1

    def release(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

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
    def serving(self, place: Placement, device: torch.device) -> Iterator[None]:
        """Context manager: layers that are updated inside write and read the rows of the pass ``place``."""
        while self.size < self.used:
            self.size = max(1, 2 * self.size)
        needed = max(place.firsts) + place.width
        if needed > self.rows:
            self.rows = max(needed, 2 * self.rows, 64)
        rows = torch.tensor(place.firsts)[:, None] + torch.arange(place.width)
        self.index = (torch.tensor(place.slots)[:, None].to(device), rows.to(device))
        self.place = place
        try:
            yield
        finally:
            self.place = self.index = None


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
        place, index = self._slots.place, self._slots.index
        if place is None or index is None:
            raise RuntimeError("this cache belongs to a foretoken model and is used outside of its pass")
        slots, rows = (part.to(key_states.device) for part in index)
        self.keys[slots, :, rows] = finite(key_states).transpose(1, 2)
        self.values[slots, :, rows] = finite(value_states).transpose(1, 2)
        return self._read(self.keys, place), self._read(self.values, place)

    def _read(self, buffer: Tensor, place: Placement) -> Tensor:
        low = place.slots[0]
        if place.slots == tuple(range(low, low + len(place.slots))):
            return buffer[low : low + len(place.slots), :, : place.reach]
        return buffer[list(place.slots), :, : place.reach]

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
        place = self._slots.place
        return 0 if place is None else place.reach - place.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        place = self._slots.place
        return (query_length if place is None else place.reach), 0

    def get_max_length(self) -> int:
        return -1
