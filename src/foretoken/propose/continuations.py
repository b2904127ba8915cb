"""Drafts out of counted continuations: what followed the same context elsewhere, as a tree with probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from foretoken.core.draft import Draft
from foretoken.propose.occurrences import BREAK

Continuation = tuple[int, ...]


@dataclass(slots=True)
class Guess:
    """A tree of tokens, parents first, with the estimated probability that the text runs through each node."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Tokens expected to be accepted, as far as the estimates are right."""
        return sum(self.probs)

    def draft(self) -> Draft:
        """Fixed candidates; a node's score is the log of its probability."""
        if not self.tokens:
            return Draft.empty()
        scores = torch.tensor([math.log(p) for p in self.probs])
        return Draft(torch.tensor(self.tokens, dtype=torch.int64), tuple(self.parents), scores=scores)


def likeliest(
    continuations: Mapping[Continuation, float], budget: int, steps: int, top_k: int, least: float = 0.0
) -> Guess:
    """The ``budget`` likeliest nodes of the continuations' trie, at most ``steps`` deep.

    continuations: weights (counts); a node's probability is its parent's times its share of the parent's weight.
    top_k: children of a node at most; 1 makes a chain of commonest tokens. least: smallest probability of a node.
    On ties the continuation that comes first wins.
    """
    guess = Guess()
    waiting: list[tuple[float, int, int, int, int, list[tuple[Continuation, float]]]] = []
    age = 0

    def offer(members: Sequence[tuple[Continuation, float]], depth: int, prob: float, parent: int) -> None:
        nonlocal age
        if len(members) == 1:  # the rest of a continuation that nothing else shares
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
            if share > 0.0 and share >= least:
                heappush(waiting, (-share, age, token, parent, depth + 1, groups[token]))
                age += 1

    offer(list(continuations.items()), 0, 1.0, -1)
    while waiting and len(guess.tokens) < budget:
        cost, _, token, parent, depth, members = heappop(waiting)
        guess.tokens.append(token)
        guess.parents.append(parent)
        guess.probs.append(-cost)
        if depth < steps:
            offer(members, depth, -cost, len(guess.tokens) - 1)
    return guess
