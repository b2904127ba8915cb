"""Attention of a ragged batch of trees over the cache, the same for every row whatever shares the pass.

``scaled_dot_product_attention`` splits its work by query and key counts, so its rows change with both. In bf16
two batched products around a float32 softmax do not, once the keys are padded to a multiple of 64 under a mask,
the heads of a group are folded into the rows, and sums over keys run in blocks of 1,024. In float32 every
product chooses its kernel by rows and keys, and a tree's path lies in other rows than plain decoding's; there
the sums over keys run in float64 (the cache holds it), so that their order does not reach float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.kv import KVCache, padded

if TYPE_CHECKING:
    from foretoken.models.decoder import Decoder

KEY_MULTIPLE, KEY_BLOCK = 64, 1024


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's rows in a pass: where they lie in its slot, and the tree among the last of them."""

    slot: int
    first: int  # the cache row of the first new row
    count: int
    nodes_at: int  # the cache row of draft node 0
    draft: Draft


@dataclass(frozen=True)
class Plan:
    """What one pass computes, on the host: the rows of every sequence one after another."""

    tokens: list[int]
    positions: list[int]
    parts: list[Part]
    outputs: list[int]
    output_counts: list[int]
    reach: int  # the highest cache row in use, plus one

    @staticmethod
    def of(handles: Sequence[Handle], drafts: Sequence[Draft], scored: Sequence[int]) -> Plan:
        """Everything pending, then the draft nodes from ``scored[i]`` on; logits from the root down."""
        tokens: list[int] = []
        positions: list[int] = []
        parts: list[Part] = []
        outputs: list[int] = []
        counts: list[int] = []
        for handle, draft, done in zip(handles, drafts, scored, strict=True):
            pending, length = handle.pending, len(handle.tokens)
            start = len(tokens)
            tokens += [*pending, *draft.ids[done:]]
            positions += [*range(handle.cached, length), *(length - 1 + d for d in draft.depths[done:])]
            count = len(tokens) - start
            if not count:
                raise ValueError("nothing to score: no pending token and no new draft node")
            wanted = len(draft) - done + (1 if pending else 0)
            outputs += range(len(tokens) - wanted, len(tokens))
            counts.append(wanted)
            first = handle.cached if pending else length + done
            parts.append(Part(handle.slot, first, count, length, draft))
        reach = max(part.first + part.count for part in parts)
        return Plan(tokens, positions, parts, outputs, counts, reach)

    def geometry(self, model: Decoder) -> Geometry:
        """The plan as tensors on the model's device; a lone row is doubled (see ``linear.py``)."""
        tokens, positions, parts = self.tokens, self.positions, self.parts
        if len(tokens) == 1:
            tokens, positions = tokens * 2, positions * 2
            lone = parts[0]
            parts = [Part(lone.slot, lone.first, 2, lone.nodes_at, lone.draft)]
        group = model.heads // model.kv_heads
        width = max(part.count for part in parts)
        low = min(part.slot for part in parts)
        high = max(part.slot for part in parts) + 1
        keys = padded(max(part.first + part.count for part in parts), KEY_MULTIPLE)
        device = model.device
        rows = [part.first + i for part in parts for i in range(part.count)]
        slots = [part.slot for part in parts for _ in range(part.count)]
        places = [(part.slot - low) * width + i for part in parts for i in range(part.count)]
        whole = places == list(range((high - low) * width))  # no gap, and parts in the order of their slots
        return Geometry(
            tokens=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            rows=torch.tensor(rows, device=device),
            slots=torch.tensor(slots, device=device),
            places=None if whole else torch.tensor(places, device=device),
            low=low,
            high=high,
            width=width,
            keys=keys,
            group=group,
            single=(parts[0].slot, parts[0].first, parts[0].count) if len(parts) == 1 else None,
            mask=_mask(parts, positions, low, high, width, keys, 0).to(device),
            windowed={
                w: _mask(parts, positions, low, high, width, keys, w).to(device)
                for w in {layer.window for layer in model._layers} - {0}
            },
        )


@dataclass(frozen=True)
class Geometry:
    """One pass on the device. ``places`` puts ragged rows into [sequences, width]; None where none is missing."""

    tokens: Tensor  # [R]
    positions: Tensor  # [R]
    rows: Tensor  # [R] row in the slot
    slots: Tensor  # [R]
    places: Tensor | None  # [R]
    low: int
    high: int
    width: int
    keys: int
    group: int
    single: tuple[int, int, int] | None
    mask: Tensor  # [S, 1, width, 1, keys] float32, 0 or -inf
    windowed: dict[int, Tensor]


def _mask(
    parts: Sequence[Part], positions: Sequence[int], low: int, high: int, width: int, keys: int, window: int
) -> Tensor:
    """Who sees what: committed rows before it, and of the draft its own ancestors. Unused rows see all."""
    seen = torch.ones(high - low, width, keys, dtype=torch.bool)
    at = 0
    for part in parts:
        rows = torch.arange(part.first, part.first + part.count)
        visible = torch.arange(keys) <= rows[:, None]
        first_node = max(part.first, part.nodes_at) - part.nodes_at
        count = len(part.draft)
        if count and not part.draft.is_chain:
            tail = visible[part.nodes_at + first_node - part.first :][: count - first_node]
            tail[:, part.nodes_at : part.nodes_at + count] = part.draft.ancestors[first_node:]
        if window:
            key_positions = torch.arange(keys)
            key_positions[part.nodes_at : part.nodes_at + count] = torch.tensor(
                [part.nodes_at - 1 + d for d in part.draft.depths], dtype=torch.int64
            )
            own = torch.tensor(positions[at : at + part.count])
            visible &= key_positions > own[:, None] - window
        seen[part.slot - low, : part.count] = visible
        at += part.count
    mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    return mask[:, None, :, None, :]


def attend(cache: KVCache, layer: int, queries_keys: Tensor, values: Tensor, g: Geometry, window: int) -> Tensor:
    """Write the new keys and values, then attend. -> [R, heads * head_dim]"""
    kv_heads, dim = values.shape[1:]
    queries, keys = queries_keys.split((queries_keys.shape[1] - kv_heads, kv_heads), dim=1)
    key_cache, value_cache = cache.keys[layer], cache.values[layer]
    if g.single is not None:
        slot, first, count = g.single
        key_cache[slot, :, first : first + count] = keys.transpose(0, 1)
        value_cache[slot, :, first : first + count] = values.transpose(0, 1)
    else:
        key_cache[g.slots, :, g.rows] = keys.to(key_cache.dtype)
        value_cache[g.slots, :, g.rows] = values.to(value_cache.dtype)
    sequences = g.high - g.low
    if g.places is not None:
        spread = queries.new_zeros(sequences * g.width, *queries.shape[1:])
        spread[g.places] = queries
        queries = spread
    queries = queries.view(sequences, g.width, kv_heads, g.group, dim).transpose(1, 2)
    queries = queries.reshape(sequences * kv_heads, g.width * g.group, dim).to(key_cache.dtype)
    seen_keys = key_cache[g.low : g.high, :, : g.keys].flatten(0, 1)
    seen_values = value_cache[g.low : g.high, :, : g.keys].flatten(0, 1)
    scores = torch.bmm(queries, seen_keys.transpose(1, 2))
    scores = scores.view(sequences, kv_heads, g.width, g.group, g.keys)
    mask = g.windowed[window] if window else g.mask
    weights = torch.add(mask, scores, alpha=dim**-0.5).softmax(-1).to(value_cache.dtype)
    mixed = _mix(weights.view(sequences * kv_heads, g.width * g.group, g.keys), seen_values)
    mixed = mixed.view(sequences, kv_heads, g.width, g.group, dim).transpose(1, 2)
    mixed = mixed.reshape(sequences * g.width, kv_heads * g.group * dim).to(values.dtype)
    return mixed if g.places is None else mixed[g.places]


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """weights @ values, summed over keys in blocks of fixed size."""
    if values.shape[1] <= KEY_BLOCK or values.dtype == torch.float64:
        return torch.bmm(weights, values)
    total: Tensor | None = None
    for start in range(0, values.shape[1], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        part = torch.bmm(weights[:, :, block], values[:, block]).float()
        total = part if total is None else total + part
    assert total is not None
    return total.to(values.dtype)
