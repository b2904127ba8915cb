"""Sampled trees: siblings sampled without replacement, or the most probable ones and one sampled, level by level.

Which nodes have children, and how many, is decided from the nodes sampled before and from the distribution that the
children will be sampled from, before that; every sampled token stays in the tree. So verification is exact whatever the
quality of the estimates below: they decide how much is accepted, never the output distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal

import torch
from torch import Tensor

from foretoken.core.draft import Draft, ProposalLaw, TopPlusSampled, WithoutReplacement, log_scores
from foretoken.core.streams import Stream
from foretoken.models.chains import LATER, MAX_FIRST, MIN_FIRST, TYPICAL
from foretoken.propose.tree import Growth

DrawnTreeKind = Literal["sampled", "greedy_multi"]


@dataclass(slots=True)
class DrawnTree(Growth):
    """A sampled tree while it grows."""

    # "sampled", siblings without replacement (Sequoia, 2402.12374), or "greedy_multi", the ``width`` - 1 most probable
    # tokens and one sampled from the others (2502.18779)
    kind: DrawnTreeKind = "sampled"
    budget: int = 0  # maximum number of nodes
    steps: int = 0  # levels left to draw
    width: int = 0  # maximum number of siblings
    stream: Stream | None = None  # the draft's private random numbers; node i is sampled with number i
    # the distribution [V] that a node's children were sampled from, by node
    rows: dict[int, Tensor] = field(default_factory=dict)
    reach: list[float] = field(default_factory=list)  # estimated probability that a node is accepted, by node

    def expand(self, probs: Tensor) -> None:
        """Draws children below the frontier.

        probs: [frontier, V], the draft's distribution at each node of the frontier.
        """
        firsts = (MIN_FIRST + (MAX_FIRST - MIN_FIRST) * probs.double().pow(3).sum(-1)).tolist()
        supports = probs.count_nonzero(-1).tolist()
        counts = self._plan(self.frontier, firsts)
        self.steps -= 1
        start = len(self.tokens)
        for node, row, count, support in zip(self.frontier, probs, counts, supports, strict=True):
            if count:
                self.rows[node] = row
                self._draw(node, row, min(count, support))
        new_nodes = range(start, len(self.tokens))
        counts = self._plan(new_nodes, [TYPICAL] * len(new_nodes))
        self.advance([node for node, count in zip(new_nodes, counts, strict=True) if count])

    def finished(self) -> Draft:
        """Returns the tree with the distributions that it was sampled from."""
        if not self.tokens:
            return Draft.empty()
        blank = torch.zeros_like(self.rows[-1])
        rows = torch.stack([self.rows.get(node, blank) for node in range(-1, max(self.parents) + 1)])
        return self.subtree(range(len(self.tokens)), self.law(rows), log_scores(self.reach))

    def law(self, rows: Tensor) -> ProposalLaw:
        """Returns the law of the tree, whose nodes were sampled from ``rows``: of the root's children first."""
        return WithoutReplacement(rows) if self.kind == "sampled" else TopPlusSampled(rows)

    def _draw(self, node: int, row: Tensor, count: int) -> None:
        """Draws ``count`` children of ``node`` and estimates the probability of reaching each."""
        assert self.stream is not None
        left = row.clone()
        above, mass = self.reach[node] if node >= 0 else 1.0, 1.0
        for rank in range(count):
            fixed = self.kind == "greedy_multi" and rank < count - 1
            token = int(left.argmax()) if fixed else self.stream.categorical(left, len(self.tokens))
            share = float(row[token])
            left[token] = 0.0
            if fixed:
                chance = min(1.0, share / mass)  # the draft's own probability, given that those before were rejected
            else:
                first = MIN_FIRST + (MAX_FIRST - MIN_FIRST) * share**2
                chance = first if rank == 0 else LATER[min(rank, len(LATER)) - 1]
            mass = max(mass - share, 1e-9)
            self.tokens.append(token)
            self.parents.append(node)
            self.reach.append(above * chance)
            above *= 1.0 - chance

    def _plan(self, nodes: Sequence[int], firsts: Sequence[float]) -> list[int]:
        """Returns the number of children of each of ``nodes``: those among the best nodes that the remaining budget
        covers.

        The best nodes are those of the expected tree, in which deeper children are accepted at typical rates.
        firsts: Acceptance probability of each node's first child.
        """
        counts = [0] * len(nodes)
        if not self.steps:
            return counts
        # Candidates: (-reach, level, owner, rank among siblings, acceptance after those before it were rejected)
        offers = [
            (-(self.reach[node] if node >= 0 else 1.0) * first, 0, owner, 0, first)
            for owner, (node, first) in enumerate(zip(nodes, firsts, strict=True))
        ]
        heapify(offers)
        left = self.budget - len(self.tokens)
        while offers and left > 0:
            reach, level, owner, rank, chance = heappop(offers)
            counts[owner] += level == 0
            left -= 1
            if rank + 1 < self.width:
                later = LATER[min(rank, len(LATER) - 1)]
                heappush(offers, (reach / chance * (1.0 - chance) * later, level, owner, rank + 1, later))
            if level + 1 < self.steps:
                heappush(offers, (reach * TYPICAL, level + 1, owner, 0, TYPICAL))
        return counts
