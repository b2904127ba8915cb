"""Drawn trees: siblings drawn without replacement, or the most probable ones and one drawn, level by level.

Which nodes have children, and how many, is decided from what was drawn before and from the law they will be drawn from,
before anything is drawn from it; every token drawn stays in the tree. So the verifiers' laws hold whatever the
estimates below are worth: they decide how much is accepted, never what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.law import TopPlusSampled, WithoutReplacement
from foretoken.core.streams import Stream
from foretoken.propose.tree import Growth

# What a 1 M draft of a 15 M target showed: the acceptance of a drawn x is about LEAST + (MOST - LEAST) q(x)^2, of a
# later sibling when those before it have failed LATER, of a first one of which nothing is known TYPICAL.
LEAST, MOST = 0.38, 0.93
LATER = (0.28, 0.19, 0.14, 0.1)
TYPICAL = 0.65


@dataclass(slots=True)
class DrawnTree(Growth):
    """At most ``budget`` nodes on at most ``steps`` levels; siblings are at most ``width``.

    kind: "sampled", siblings drawn without replacement (Sequoia, 2402.12374), or "greedy_multi", the ``width`` - 1 most
    probable tokens and one drawn from the rest (2502.18779). stream: the draft's private numbers; node i is drawn with
    number i.
    """

    kind: Literal["sampled", "greedy_multi"] = "sampled"
    budget: int = 0
    steps: int = 0
    width: int = 0
    stream: Stream | None = None
    rows: dict[int, Tensor] = field(default_factory=dict)  # by node: the law its children were drawn from, [V]
    reach: list[float] = field(default_factory=list)  # by node: an estimate that it is accepted

    def expand(self, probs: Tensor) -> None:
        """Draw below the frontier. probs: [frontier, V], the draft's law at each of its nodes."""
        firsts = (LEAST + (MOST - LEAST) * probs.double().pow(3).sum(-1)).tolist()
        supports = probs.count_nonzero(-1).tolist()
        counts = self._plan(self.frontier, firsts)
        self.steps -= 1
        start = len(self.tokens)
        for node, row, count, support in zip(self.frontier, probs, counts, supports, strict=True):
            if count:
                self.rows[node] = row
                self._draw(node, row, min(count, support))
        fresh = range(start, len(self.tokens))
        counts = self._plan(fresh, [TYPICAL] * len(fresh))
        self.advance([node for node, count in zip(fresh, counts, strict=True) if count])

    def finished(self) -> Draft:
        """The tree with the law that it was drawn from."""
        if not self.tokens:
            return Draft.empty()
        blank = torch.zeros_like(self.rows[-1])
        rows = torch.stack([self.rows.get(node, blank) for node in range(-1, max(self.parents) + 1)])
        law = WithoutReplacement(rows) if self.kind == "sampled" else TopPlusSampled(rows)
        return self.subtree(range(len(self.tokens)), law, torch.tensor(self.reach).log())

    def _draw(self, node: int, row: Tensor, count: int) -> None:
        """``count`` children of ``node``, each with an estimate of reaching it."""
        assert self.stream is not None
        left = row.clone()
        above, rest = self.reach[node] if node >= 0 else 1.0, 1.0
        for rank in range(count):
            fixed = self.kind == "greedy_multi" and rank < count - 1
            token = int(left.argmax()) if fixed else self.stream.categorical(left, len(self.tokens))
            share = float(row[token])
            left[token] = 0.0
            if fixed:
                chance = min(1.0, share / rest)  # as the draft itself sees it, those before having failed
            else:
                chance = LEAST + (MOST - LEAST) * share**2 if rank == 0 else LATER[min(rank, len(LATER)) - 1]
            rest = max(rest - share, 1e-9)
            self.tokens.append(token)
            self.parents.append(node)
            self.reach.append(above * chance)
            above *= 1.0 - chance

    def _plan(self, nodes: Sequence[int], firsts: Sequence[float]) -> list[int]:
        """How many children each of ``nodes`` is to have: those among the best that the rest of the budget can buy.

        The best nodes of the tree that is expected, in which every child further down is accepted as such children
        usually are. firsts: how likely each node's first child is accepted.
        """
        counts = [0] * len(nodes)
        if not self.steps:
            return counts
        # What can be bought: (-reach, level, owner, rank among siblings, its acceptance when those before it failed)
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
