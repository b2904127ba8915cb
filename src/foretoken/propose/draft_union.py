"""Drafts of several proposers for one sequence, merged into one tree with shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.core.draft import Decision, Draft, log_scores


@dataclass(eq=False, slots=True)
class DraftUnion:
    """A merged tree. Nodes are in the order of insertion, so parents come before children.

    Attributes:
        rates: P(node accepted | its parent accepted).
        owners: The proposer with the highest rate for each node.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    _nodes: dict[tuple[int, int], int] = field(default_factory=dict)  # by parent and token

    def add(self, draft: Draft, rates: Sequence[float], owner: str) -> list[int]:
        """Adds a draft of fixed candidates.

        Args:
            rates: P(node accepted | its parent accepted) of each node.

        Returns:
            The index in the union of each node of the draft.
        """
        nodes: list[int] = []
        for token, parent, rate in zip(draft.ids, draft.parents, rates, strict=True):
            above = nodes[parent] if parent >= 0 else -1
            node = self._nodes.setdefault((above, token), len(self.tokens))
            nodes.append(node)
            if node == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(above)
                self.rates.append(rate)
                self.owners.append(owner)
            elif rate > self.rates[node]:
                self.rates[node], self.owners[node] = rate, owner
        return nodes

    def weights(self) -> list[float]:
        """Returns P(node accepted) of every node.

        At most one sibling can be accepted: the likeliest keeps its rate, the others get at most the remainder.
        """
        left = [1.0] * (len(self.tokens) + 1)  # by parent, the root's first
        shares = [0.0] * len(self.tokens)
        for node in sorted(range(len(self.tokens)), key=self.rates.__getitem__, reverse=True):
            above = self.parents[node] + 1
            shares[node] = min(self.rates[node], left[above])
            left[above] -= shares[node]
        weights: list[float] = []
        for share, parent in zip(shares, self.parents, strict=True):
            weights.append(share * (weights[parent] if parent >= 0 else 1.0))
        return weights

    def draft(
        self, kept: Sequence[int], weights: Sequence[float], levels: int, decision: Decision | None = None
    ) -> Draft:
        """Returns the tree of the nodes ``kept``, scored by log ``weights``.

        Args:
            kept: Indices in rising order, with every node's parent.
            weights: P(node accepted) of every node.
            levels: Passes of the draft model.
            decision: The numbers behind it.
        """
        number = {node: i for i, node in enumerate(kept)}
        return Draft(
            tuple([self.tokens[node] for node in kept]),
            tuple([number[self.parents[node]] if self.parents[node] >= 0 else -1 for node in kept]),
            scores=log_scores([weights[node] for node in kept]),
            levels=levels,
            decision=decision,
        )
