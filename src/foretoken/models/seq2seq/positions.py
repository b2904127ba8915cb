"""T5's relative positions (1910.10683, 2.1): one number for each head and each bucket of distances, added to scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foretoken.models.attention import Geometry
from foretoken.models.plan import Plan


def buckets(count: int, farthest: int, both_ways: bool) -> Tensor:
    """The bucket of every distance key - query from -farthest to farthest, int64 [2 farthest + 1].

    Half of the buckets of a direction hold one distance each, the others grow with its logarithm. A decoder sees no
    key that lies ahead; such distances count as 0.
    """
    distance = torch.arange(-farthest, farthest + 1)
    ahead = torch.zeros_like(distance)
    if both_ways:
        count //= 2
        ahead = (distance > 0).long() * count
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = count // 2
    # the same float32 steps as in the model's own training, since a bucket's edge is decided by rounding
    far = exact + (torch.log(distance.float() / exact) / math.log(farthest / exact) * (count - exact)).long()
    return ahead + torch.where(distance < exact, distance, far.clamp(max=count - 1))


class RelativeBias:
    """One table [buckets, heads] as what every distance adds."""

    def __init__(self, table: Tensor, farthest: int, both_ways: bool) -> None:
        self._farthest = farthest
        self._by_distance = table.T[:, buckets(table.shape[0], farthest, both_ways)].contiguous()  # [heads, distances]

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [..., Q] and [..., K] -> float32 [heads, ..., Q, K]"""
        distance = (keys[..., None, :] - queries[..., :, None]).clamp_(-self._farthest, self._farthest)
        return self._by_distance[:, distance + self._farthest]


def positions_of(plan: Plan, g: Geometry) -> tuple[Tensor, Tensor]:
    """Where the queries of a pass stand, [S, width], and the keys it reads, [S, K]; a draft's nodes by their depth."""
    queries = torch.zeros(g.high - g.low, g.width, dtype=torch.int64)
    keys = torch.arange(g.keys).repeat(g.high - g.low, 1)
    at = 0
    for part in plan.parts:
        row = part.slot - g.low
        queries[row, : part.count] = torch.tensor(plan.positions[at : at + part.count])
        if not part.draft.is_chain:
            depths = torch.tensor(part.draft.depths)
            keys[row, part.nodes_at : part.nodes_at + len(depths)] = part.nodes_at - 1 + depths
        at += part.count
    return queries, keys
