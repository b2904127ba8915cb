"""A proposal: a rooted tree of tokens and the law it was drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from foretoken.core.law import PointMass, ProposalLaw


@dataclass(frozen=True)
class Draft:
    """Guessed continuations of one sequence, as a tree below its last committed token.

    tokens: int64 [n], the guesses, parents before children.
    parents: for each node its parent's index; -1 is the root, the last committed token.
    law: how the tokens were drawn; decides which verification rule is exact.
    scores: [n], optional confidence for controllers and viewers, never read by a verifier.

    A chain has parents (-1, 0, 1, ...). The empty draft is legal and is plain decoding.
    """

    tokens: Tensor
    parents: tuple[int, ...]
    law: ProposalLaw = field(default_factory=PointMass)
    scores: Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or len(self.parents) != self.tokens.shape[0]:
            raise ValueError(f"{len(self.parents)} parents for tokens of shape {tuple(self.tokens.shape)}")
        if any(not -1 <= p < i for i, p in enumerate(self.parents)):
            raise ValueError(f"each parent must come before its child, -1 the root; got {self.parents}")

    @staticmethod
    def empty() -> Draft:
        return _EMPTY

    @staticmethod
    def chain(tokens: Sequence[int] | Tensor, law: ProposalLaw | None = None) -> Draft:
        """A single path of guesses; the default law is that of fixed candidates."""
        ids = torch.as_tensor(tokens, dtype=torch.int64)
        return Draft(ids, tuple(range(-1, ids.shape[0] - 1)), law or PointMass())

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The tokens on the host."""
        return tuple(self.tokens.tolist())

    @cached_property
    def is_chain(self) -> bool:
        return all(p == i - 1 for i, p in enumerate(self.parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def chance(self, node: int) -> float | None:
        """What the token of ``node`` was drawn with, None for a fixed candidate."""
        if isinstance(self.law, PointMass):
            return None
        return float(self.law.probs[self.parents[node] + 1, self.ids[node]])

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node in order; entry 0 is the root's, entry i + 1 node i's."""
        lists: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            lists[parent + 1].append(node)
        return tuple(map(tuple, lists))

    @cached_property
    def ancestors(self) -> Tensor:
        """bool [n, n]: entry (i, j) says whether node j is node i or above it. The tree's attention mask."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to ``node``; empty for the root (-1)."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))


_EMPTY = Draft(torch.empty(0, dtype=torch.int64), ())
