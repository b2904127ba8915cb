"""Draft trees from counted continuations: what followed the same context elsewhere, with probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from foretoken.core.draft import Draft, log_scores
from foretoken.propose.matches import BREAK

Continuation = tuple[int, ...]


@dataclass(slots=True)
class CandidateTree:
    """A tree of tokens, parents first, with the estimated probability that the output passes through each node."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Expected number of accepted tokens, if the estimates are right."""
        return sum(self.probs)

    def draft(self, match: int = 0) -> Draft:
        """Returns fixed candidates. A node's score is the log of its probability.

        Args:
            match: Length of the matched context. A longer one is more likely to go on: one of m tokens goes on for
                another with m / (m + 2). 0 is unknown.
        """
        if not self.tokens:
            return Draft.empty()
        further: list[float] = []  # P(the match holds up to the node)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else match)
            above = further[parent] if parent >= 0 else 1.0
            further.append(above * depths[-1] / (depths[-1] + 2.0) if match else 1.0)
        probs = [p * holds for p, holds in zip(self.probs, further, strict=True)]
        return Draft.tree(self.tokens, self.parents, log_scores(probs))


def candidate_tree(
    continuations: Mapping[Continuation, float], budget: int, steps: int, top_k: int, min_prob: float = 0.0
) -> CandidateTree:
    """Returns the ``budget`` likeliest nodes of the trie of ``continuations``.

    On ties the earlier continuation wins.

    Args:
        continuations: Weights (counts). A node's probability is its parent's times its share of the parent's weight.
        budget: Maximum number of nodes.
        steps: Maximum depth.
        top_k: Maximum number of children of a node. 1 makes a chain of the commonest tokens.
        min_prob: Minimum probability of a node.
    """
    tree = CandidateTree()
    waiting: list[tuple[float, int, int, int, int, list[tuple[Continuation, float]]]] = []
    age = 0

    def offer(members: Sequence[tuple[Continuation, float]], depth: int, prob: float, parent: int) -> None:
        nonlocal age
        if len(members) == 1:  # the remainder of a continuation that no other one shares
            token = members[0][0][depth] if depth < len(members[0][0]) else BREAK
            if token != BREAK:
                heappush(waiting, (-prob, age, token, parent, depth + 1, list(members)))
                age += 1
            return
        weights: dict[int, float] = {}
        groups: dict[int, list[tuple[Continuation, float]]] = {}
        for member in members:
            token = member[0][depth] if depth < len(member[0]) else BREAK
            weights[token] = weights.get(token, 0.0) + member[1]
            groups.setdefault(token, []).append(member)
        total = sum(weights.values())
        weights.pop(BREAK, None)
        for token in sorted(weights, key=weights.__getitem__, reverse=True)[:top_k]:
            share = prob * weights[token] / total
            if share > 0.0 and share >= min_prob:
                heappush(waiting, (-share, age, token, parent, depth + 1, groups[token]))
                age += 1

    offer(list(continuations.items()), 0, 1.0, -1)
    while waiting and len(tree.tokens) < budget:
        cost, _, token, parent, depth, members = heappop(waiting)
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.probs.append(-cost)
        if depth < steps:
            offer(members, depth, -cost, len(tree.tokens) - 1)
    return tree
