"""Batch-invariant attention of a ragged batch of draft trees over the KV cache, made of torch operators.

``scaled_dot_product_attention`` splits its work by the numbers of queries and keys, so its rows change with both. In
bf16, two batched products around a float32 softmax do not change, if the keys are padded to a multiple of 64 under a
mask, the heads of a group are folded into the rows, and sums over keys run in blocks of 256. In float32, every product
chooses its kernel by the numbers of rows and keys, and the path of a tree has other cache rows than in plain decoding.
So sums over keys run in float64, the type of the cache then, and their order does not affect the float32 result.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.models.runners.layout import AttentionSizes
from foretoken.models.runners.pass_plan import Part, PassPlan
from foretoken.models.state.kv import KVCache, finite, padded

KEY_MULTIPLE, KEY_BLOCK = 64, 256


@dataclass(frozen=True)
class Geometry:
    """The layout of one pass as tensors on the device.

    Rows R are ragged; attention takes them padded to [S, width], one sequence for each slot from ``low`` to ``high``.
    """

    tokens: Tensor  # the token of each row [R]
    positions: Tensor  # the position of each row [R]
    rows: Tensor  # the cache row of each row [R]
    slots: Tensor  # the slot of each row [R]
    places: Tensor | None  # the index of each row in [S * width], [R]; None without padding
    low: int  # the lowest slot of the pass
    high: int  # the highest slot, plus one
    width: int  # rows per sequence, padding included
    keys: int  # number of cache rows that are read
    single: tuple[int, int, int] | None  # slot, first row and row count of the only sequence; None for several
    masks: dict[tuple[int, bool], Tensor]  # by view (``Layer.view``), 0 or -inf, float32 [S, 1, width, 1, keys]
    cache: KVCache  # the KV cache
    by_layer: tuple[Tensor, ...] = ()  # masks of each layer in place of ``masks``; empty if none differ

    @property
    def counts(self) -> None:
        """See ``Layout``: no row is padding."""

    @property
    def steps(self) -> None:
        """See ``Layout``: there are no recurrent layers."""

    @staticmethod
    def of(plan: PassPlan, cache: KVCache, views: Iterable[tuple[int, bool]], device: torch.device) -> "Geometry":
        """Returns the layout of a plan. A single row is doubled (see ``linear.py``)."""
        tokens, positions, parts = plan.tokens, plan.positions, plan.parts
        if len(tokens) == 1:
            tokens, positions = tokens * 2, positions * 2
            parts = [replace(parts[0], count=2)]
        width = max(part.count for part in parts)
        low = min(part.slot for part in parts)
        high = max(part.slot for part in parts) + 1
        keys = padded(max(part.first + part.count for part in parts), KEY_MULTIPLE)
        rows = [part.first + i for part in parts for i in range(part.count)]
        slots = [part.slot for part in parts for _ in range(part.count)]
        places = [(part.slot - low) * width + i for part in parts for i in range(part.count)]

        def additive(window: int, ordered: bool) -> Tensor:
            seen = visible_keys(parts, positions, low, high, width, keys, window, ordered)
            return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None, :, None, :]

        contiguous = places == list(range((high - low) * width))  # no gap, and parts in the order of their slots
        return Geometry(
            tokens=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            rows=torch.tensor(rows, device=device),
            slots=torch.tensor(slots, device=device),
            places=None if contiguous else torch.tensor(places, device=device),
            low=low,
            high=high,
            width=width,
            keys=keys,
            single=(parts[0].slot, parts[0].first, parts[0].count) if len(parts) == 1 else None,
            masks={view: additive(*view).to(device) for view in set(views)},
            cache=cache,
        )

    def attend(
        self,
        layer: int,
        queries_keys: Tensor,
        values: Tensor,
        a: AttentionSizes,
        view: tuple[int, bool],
        sinks: Tensor | None = None,
    ) -> Tensor:
        mask = self.by_layer[layer] if self.by_layer else self.masks[view]
        return attend(layer, queries_keys, values, self, a, mask, sinks)

    def biased(self, table: Tensor, plan: PassPlan) -> "Geometry":
        """Returns the layout with biases in the masks, [S, kv_heads = 1, width, heads, keys]: ALiBi.

        table: biases [heads, positions], whose differences are used; see ``families.architecture.Alibi``.
        """
        rows, keys = self._positions(plan)
        biases = (table[:, keys][:, :, None] - table[:, rows][..., None]).permute(1, 2, 0, 3)[:, None]
        return replace(self, masks={view: mask + biases.to(mask.device) for view, mask in self.masks.items()})

    def relative(self, tables: Sequence[Tensor], plan: PassPlan) -> "Geometry":
        """Returns the layout with T5's biases in the masks, [S, heads, width, 1, keys]. All layers have one view.

        tables: for each layer biases by distance, [heads, 2 * farthest + 1]; equal ones may be the same object.
        """
        rows, keys = self._positions(plan)
        distance = keys[:, None] - rows[:, :, None]
        (mask,) = self.masks.values()
        masks: dict[int, Tensor] = {}
        for table in tables:
            if id(table) not in masks:
                farthest = table.shape[1] // 2
                biases = table[:, distance.clamp(-farthest, farthest) + farthest].transpose(0, 1)[:, :, :, None]
                masks[id(table)] = biases.to(mask.device) + mask
        return replace(self, by_layer=tuple(masks[id(table)] for table in tables))

    def _positions(self, plan: PassPlan) -> tuple[Tensor, Tensor]:
        """Returns the positions of rows [S, width] and keys [S, keys]; a draft node's follows from its depth."""
        keys = torch.arange(self.keys).repeat(self.high - self.low, 1)
        rows = torch.zeros(self.high - self.low, self.width, dtype=torch.long)
        at = 0
        for part in plan.parts:
            depths = torch.tensor(part.draft.depths, dtype=torch.long)
            keys[part.slot - self.low, part.nodes_at : part.nodes_at + len(depths)] = part.nodes_at - 1 + depths
            rows[part.slot - self.low, : part.count] = torch.tensor(plan.positions[at : at + part.count])
            at += part.count
        return rows, keys


def visible_keys(
    parts: Sequence[Part],  # the rows of each sequence
    positions: Sequence[int],  # the position of each row
    low: int,  # the lowest slot
    high: int,  # the highest slot, plus one
    width: int,  # rows of each slot, padding included
    keys: int,  # cache rows of each slot
    window: int,  # see ``Layer.window``
    ordered: bool,  # see ``Layer.ordered``
) -> Tensor:
    """Returns the keys that each row sees: the committed rows before it and its ancestors. Padding sees all.

    Returns:
        bool [high - low, width, keys]
    """
    seen = torch.ones(high - low, width, keys, dtype=torch.bool)
    at = 0
    for part in parts:
        rows = torch.arange(part.first, part.first + part.count)
        visible = torch.arange(keys) <= (rows.clamp(min=part.end - 1) if part.mutual and not ordered else rows)[:, None]
        first_node = max(part.first, part.nodes_at) - part.nodes_at
        count = len(part.draft)
        if count and not part.draft.is_chain:
            tail = visible[part.nodes_at + first_node - part.first :][: count - first_node]
            tail[:, part.nodes_at : part.nodes_at + count] = part.draft.ancestors[first_node:]
        if window:  # negative: chunks
            key_positions = torch.arange(keys)
            key_positions[part.nodes_at : part.nodes_at + count] = torch.tensor(
                [part.nodes_at - 1 + d for d in part.draft.depths], dtype=torch.int64
            )
            row_positions = torch.tensor(positions[at : at + part.count])
            first = row_positions + 1 - window if window > 0 else row_positions // -window * -window
            visible &= key_positions >= first[:, None]
        seen[part.slot - low, : part.count] = visible
        at += part.count
    return seen


def attend(
    layer: int,  # index of the layer in the cache
    # [R, heads + kv_heads, head_dim]; [R, heads, head_dim] for a layer that reads another layer's keys
    queries_keys: Tensor,
    values: Tensor,  # [R, kv_heads, head_dim], or [R, 0, head_dim]
    g: Geometry,
    a: AttentionSizes,
    mask: Tensor,
    sinks: Tensor | None = None,  # scores [heads] of a key without a value; None for none
) -> Tensor:
    """Writes new keys and values to the cache, if any, then computes attention under ``mask``.

    Returns:
        [R, heads * head_dim]
    """
    heads = a.heads
    queries, keys = queries_keys[:, :heads], queries_keys[:, heads:]
    keys, values = finite(keys), finite(values)
    key_cache, value_cache = g.cache.keys[layer], g.cache.values[layer]
    if not keys.shape[1]:
        pass
    elif g.single is not None:
        slot, first, count = g.single
        key_cache[slot, :, first : first + count] = keys.transpose(0, 1)
        value_cache[slot, :, first : first + count] = values.transpose(0, 1)
    else:
        key_cache[g.slots, :, g.rows] = keys.to(key_cache.dtype)
        value_cache[g.slots, :, g.rows] = values.to(value_cache.dtype)
    cached = key_cache[g.low : g.high, :, : g.keys], value_cache[g.low : g.high, :, : g.keys]
    return look_up(queries, *cached, mask, g, a, sinks)


def look_up(
    queries: Tensor,
    keys: Tensor,  # [S, kv_heads, K, head_dim]
    values: Tensor,  # [S, kv_heads, K, head_dim]
    mask: Tensor,  # is added to the scores, broadcast to [S, kv_heads, width, group, K]
    g: Geometry,
    a: AttentionSizes,
    sinks: Tensor | None = None,  # see ``attend``
) -> Tensor:
    """Computes attention. Returns [R, heads * head_dim]."""
    dtype, heads, kv_heads, dim = queries.dtype, a.heads, a.kv_heads, a.head_dim
    sequences, group = g.high - g.low, heads // kv_heads
    if g.places is not None:
        spread = queries.new_zeros(sequences * g.width, heads, dim)
        spread[g.places] = queries
        queries = spread
    queries = queries.view(sequences, g.width, kv_heads, group, dim).transpose(1, 2)
    queries = queries.reshape(sequences * kv_heads, g.width * group, dim).to(keys.dtype)
    count = keys.shape[2]
    scores = torch.bmm(queries, keys.flatten(0, 1).transpose(1, 2)).view(sequences, kv_heads, g.width, group, count)
    if mask.shape[3] > 1:  # masks of query heads differ
        mask = mask.view(sequences, g.width, kv_heads, group, count).transpose(1, 2)
    sink = None if sinks is None else sinks.view(kv_heads, 1, group, 1)
    weights = _soft(scores, mask, a, sink).to(values.dtype)
    mixed = _mix(weights.view(sequences * kv_heads, g.width * group, count), values.flatten(0, 1))
    mixed = mixed.view(sequences, kv_heads, g.width, group, dim).transpose(1, 2)
    mixed = mixed.reshape(sequences * g.width, heads * dim).to(dtype)
    return mixed if g.places is None else mixed[g.places]


def _soft(scores: Tensor, mask: Tensor, a: AttentionSizes, sink: Tensor | None = None) -> Tensor:
    """Scales, caps (Gemma 2, 2408.00118: cap * tanh(x / cap)) and masks scores; returns their softmax.

    It is computed at least in float32. A sink counts as one more key.
    """
    scale, cap = a.scale, a.attention_softcap
    if cap:
        scores, scale = (scores.to(torch.promote_types(scores.dtype, mask.dtype)) * (scale / cap)).tanh_(), cap
    masked = torch.add(mask, scores, alpha=scale)
    if sink is None:
        return masked.softmax(-1)
    return torch.cat((masked, sink.to(masked.dtype).expand(*masked.shape[:-1], 1)), -1).softmax(-1)[..., :-1]


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """Returns weights @ values. On the CPU, sums over keys run in blocks of fixed size, for batch invariance."""
    if values.shape[1] <= KEY_BLOCK or values.dtype == torch.float64 or not values.is_cpu:
        return torch.bmm(weights, values)
    total: Tensor | None = None
    for start in range(0, values.shape[1], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        part = torch.bmm(weights[:, :, block], values[:, block]).float()
        total = part if total is None else total + part
    assert total is not None
    return total.to(values.dtype)
