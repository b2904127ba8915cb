"""Drafts of several makers for one sequence, as one tree: what they share is one path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foretoken.core.draft import Draft


@dataclass(eq=False, slots=True)
class Union:
    """Nodes in the order they came, so parents before children; ``owners`` says who was surest of each."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    _nodes: dict[tuple[int, int], int] = field(default_factory=dict)  # by parent and token

    def add(self, draft: Draft, rates: Sequence[float], owner: str) -> list[int]:
        """Fixed candidates, and P(node stands | its parent stands) of each. -> where they are"""
        places: list[int] = []
        for token, parent, rate in zip(draft.ids, draft.parents, rates, strict=True):
            above = places[parent] if parent >= 0 else -1
            node = self._nodes.setdefault((above, token), len(self.tokens))
            places.append(node)
            if node == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(above)
                self.rates.append(rate)
                self.owners.append(owner)
            elif rate > self.rates[node]:
                self.rates[node], self.owners[node] = rate, owner
        return places

    def weights(self) -> list[float]:
        """P(node stands) of every node. Of siblings one can at most: the surest has its rate, the next what is left."""
        left = [1.0] * (len(self.tokens) + 1)  # by parent, the root's first
        shares = [0.0] * len(self.tokens)
        for node in sorted(range(len(self.tokens)), key=lambda i: -self.rates[i]):
            above = self.parents[node] + 1
            shares[node] = min(self.rates[node], left[above])
            left[above] -= shares[node]
        weights: list[float] = []
        for share, parent in zip(shares, self.parents, strict=True):
            weights.append(share * (weights[parent] if parent >= 0 else 1.0))
        return weights

    def draft(self, kept: Sequence[int], weights: Sequence[float]) -> Draft:
        """The tree of the nodes ``kept``, in rising order and with every node's parent, scored by log ``weights``."""
        number = {node: i for i, node in enumerate(kept)}
        return Draft(
            torch.tensor([self.tokens[node] for node in kept], dtype=torch.int64),
            tuple(number[self.parents[node]] if self.parents[node] >= 0 else -1 for node in kept),
            scores=torch.tensor([weights[node] for node in kept]).log(),
        )
