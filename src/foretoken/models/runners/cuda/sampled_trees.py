"""Sampled trees that grow on the device. ``propose/drawn_tree.py`` is the reference, and has the reasons."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.models.chains import LATER, MAX_FIRST, MIN_FIRST, TYPICAL
from foretoken.models.runners.cuda.drafts import BUDGET, NOISE, STEPS
from foretoken.models.runners.cuda.graphs import States
from foretoken.models.runners.cuda.growth import NODES, ROWS, at_fraction, distributions, node_fields
from foretoken.models.runners.cuda.levels import Levels


def grow_sampled_trees(levels: Levels) -> States:
    """Grows a tree of sampled tokens for each sequence.

    Returns:
        ``NODES``; those that are not there come last. ``ROWS``, [sequences, 2 + nodes, width]: the distribution of the
        root's children and of each node's, zeros where there are none. The last one has no meaning.
    """
    tree, logits = SampledTrees(levels), levels.first()
    for level in range(levels.bucket.levels):
        tree.expand(logits, level)
        if level + 1 < levels.bucket.levels:
            logits = levels.next(*tree.advance(level + 1))
    return tree.results()


class SampledTrees:
    """The trees of all sequences while they grow. Fields of nodes have one element more, for nodes that do not exist.

    Args:
        levels: the passes.
    """

    def __init__(self, levels: Levels) -> None:
        self._levels, self._bucket = levels, levels.bucket
        bucket = levels.bucket
        count, nodes, table = bucket.sequences, bucket.kept, levels.sequences
        self._count = torch.zeros_like(levels.each(BUDGET))  # number of nodes
        self._tokens = torch.zeros(count, nodes + 1, dtype=torch.int64, device=table.device)
        self._parents = torch.full_like(self._tokens, -1)
        self._reach = torch.zeros_like(self._tokens, dtype=torch.float64)
        self._rows = self._reach.new_zeros(count * (nodes + 2), bucket.tokens[1], dtype=torch.float32)
        uniforms = table[NOISE : NOISE + nodes].T.contiguous().view(torch.float64)
        self._uniforms = torch.cat((uniforms, torch.full_like(uniforms[:, :1], 0.5)), 1)
        self._frontier = self._count - 1  # [sequences, frontier], numbers of nodes
        self._above = torch.ones_like(self._reach[:, :1])  # their reach, 0 for none
        self._numbers, self._chances = self._frontier, self._above  # of the newest nodes, [sequences, frontier * width]

    def expand(self, logits: Tensor, level: int) -> None:
        """Samples children of the frontier by its logits [sequences * frontier, V]."""
        bucket, width = self._bucket, self._bucket.siblings
        count, frontier = self._frontier.shape
        rows = distributions(logits, self._levels, frontier).nan_to_num(0.0)
        firsts = MIN_FIRST + (MAX_FIRST - MIN_FIRST) * rows.double().pow(3).sum(-1).view(count, frontier)
        planned = self._plan(self._above, firsts, level)
        self._keep(rows, planned)
        children = planned.minimum(rows.count_nonzero(-1).view(count, frontier))
        start = self._count + children.cumsum(1) - children
        left, above, mass = rows.clone(), self._above, torch.ones_like(self._above)
        numbers, chances = list[Tensor](), list[Tensor]()
        for rank in range(width):
            there, fixed = rank < children, rank < children - 1
            number = (start + rank).where(there, bucket.kept)
            token = at_fraction(left, self._uniforms.gather(1, number).view(-1, 1))
            if bucket.kind == "greedy_multi":
                token = left.argmax(-1).where(fixed.flatten(), token)
            share = rows.gather(1, token[:, None]).view(count, frontier).double()
            left.scatter_(1, token[:, None], 0.0)
            chance = torch.full_like(share, LATER[min(rank, len(LATER)) - 1]) if rank else _first_chance(share)
            if bucket.kind == "greedy_multi":
                chance = (share / mass).clamp(max=1.0).where(fixed, chance)
            mass = (mass - share).clamp(min=1e-9)
            reach = (above * chance).where(there, 0.0)
            self._tokens.scatter_(1, number, self._levels.targets(token).view(count, frontier))
            self._parents.scatter_(1, number, self._frontier)
            self._reach.scatter_(1, number, reach)
            above = above * (1.0 - chance)
            numbers.append(number)
            chances.append(reach)
        self._count = self._count + children.sum(1, keepdim=True)
        self._numbers, self._chances = (torch.stack(each, 2).flatten(1) for each in (numbers, chances))

    def _keep(self, rows: Tensor, planned: Tensor) -> None:
        """Stores the distributions of nodes that have children."""
        count, places = len(planned), self._bucket.kept + 2
        index = (self._frontier + 1).where(planned > 0, places - 1)
        index = index + places * torch.arange(count, device=index.device)[:, None]
        self._rows.index_copy_(0, index.flatten(), self._levels.widened(rows))

    def advance(self, depth: int) -> tuple[Tensor, Tensor]:
        """Makes the newest nodes that are to have children the frontier.

        Returns:
            Their tokens, and the rows of the level that they follow, [sequences * frontier].
        """
        bucket, before = self._bucket, self._frontier.shape[1]
        goes_on = self._plan(self._chances, torch.full_like(self._chances, TYPICAL), depth) > 0
        at = goes_on.int().sort(dim=1, descending=True, stable=True).indices[:, : bucket.width]
        if (missing := bucket.width - at.shape[1]) > 0:
            at = torch.cat((at, at[:, :1].expand(-1, missing)), 1)
        rank = torch.arange(bucket.width, device=at.device)
        there = rank < goes_on.sum(1, keepdim=True)
        self._frontier = self._numbers.gather(1, at).where(there, bucket.kept)
        self._above = self._chances.gather(1, at).where(there, 0.0)
        first = torch.arange(len(at), device=at.device)[:, None] * before
        return self._tokens.gather(1, self._frontier).flatten(), (first + at // bucket.siblings).flatten()

    def _plan(self, above: Tensor, firsts: Tensor, depth: int) -> Tensor:
        """Returns the number of children of each node: those among the best nodes that the remaining budget covers.

        Args:
            above: probability of reaching each node, float64 [sequences, nodes]; 0 for nodes that do not exist.
            firsts: acceptance probability of each node's first child.
            depth: levels above the children.
        """
        reach = [above * firsts]
        for number in range(1, self._bucket.siblings):
            chance = firsts if number == 1 else LATER[min(number - 1, len(LATER)) - 1]
            reach.append(reach[-1] / chance * (1.0 - chance) * LATER[min(number, len(LATER)) - 1])
        offers = torch.stack(reach, 2).flatten(1)
        deeper = self._levels.below[:, depth, None] * offers[..., None]
        order = torch.cat((offers, deeper.flatten(1)), 1).sort(dim=1, descending=True, stable=True).indices
        places = torch.arange(order.shape[1], device=order.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, places)
        left = self._levels.each(BUDGET) - self._count
        taken = (rank[:, : offers.shape[1]] < left) & (offers > 0.0) & (self._levels.each(STEPS) > depth)
        return taken.view(*above.shape, -1).sum(2)

    def results(self) -> States:
        """Returns the results of a graph."""
        nodes, count = self._bucket.kept, self._bucket.sequences
        number = torch.arange(nodes, device=self._tokens.device)
        there, parents = number < self._count, self._parents[:, :nodes]
        scores = self._reach[:, :nodes].log().float().where(there, -torch.inf)
        up = number - parents.where(there, -1)
        rows = self._rows.view(count, nodes + 2, -1)
        return {NODES: node_fields(self._tokens[:, :nodes].where(there, 0), up, scores), ROWS: rows}


def _first_chance(share: Tensor) -> Tensor:
    return MIN_FIRST + (MAX_FIRST - MIN_FIRST) * (share * share)
