"""T5's relative positions (1910.10683, 2.1): a bias on the scores for each head and each bucket of distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foretoken.models.runners.attention import Geometry
from foretoken.models.runners.pass_plan import PassPlan


def buckets(count: int, farthest: int, both_ways: bool) -> Tensor:
    """Returns the bucket of every distance key - query from -farthest to farthest, int64 [2 farthest + 1].

    Half of the buckets of a direction hold one distance each; the others grow logarithmically with the distance.

    Args:
        count: number of buckets.
        farthest: distance beyond which all distances share a bucket.
        both_ways: whether rows see keys after them (encoder). In a decoder such distances count as 0.
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
    # the same float32 operations as in transformers, because rounding decides the edges of buckets
    far = exact + (torch.log(distance.float() / exact) / math.log(farthest / exact) * (count - exact)).long()
    return ahead + torch.where(distance < exact, distance, far.clamp(max=count - 1))


class RelativeBias:
    """Biases by distance, float32 [heads, 2 farthest + 1]."""

    def __init__(self, by_distance: Tensor) -> None:
        self._by_distance, self._farthest = by_distance, by_distance.shape[1] // 2

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns the biases for positions [..., Q] and [..., K], float32 [heads, ..., Q, K]."""
        distance = (keys[..., None, :] - queries[..., :, None]).clamp_(-self._farthest, self._farthest)
        return self._by_distance[:, distance + self._farthest]


def positions_of(plan: PassPlan, g: Geometry) -> tuple[Tensor, Tensor]:
    """Returns the positions of a pass's queries [S, width] and keys [S, K]; a draft node's follows from its depth."""
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
