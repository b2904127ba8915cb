"""A draft: a rooted tree of tokens, and the distribution that they were sampled from.

The verifier is chosen by the type of that distribution, so it is a closed sum type and never a flag.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PointMass:
    """Fixed candidates: the verifier needs no proposal distribution (n-gram, suffix, argmax draft, top-k tree).

    Candidates sampled with the target's noise (the trajectory grade) belong here too: the emitted token does not
    depend on them.
    """


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens sampled independently from ``probs``; children of one node are i.i.d. from that node's row.

    Args:
        probs: [rows, V]. Row r is the distribution at node r - 1, row 0 at the root, as in the target's rows. It is the
            row the tokens were sampled from, after temperature and filters, never recomputed.
    """

    probs: Tensor


class Elsewhere:
    """Distributions of a draft on a device, until they are read.

    Args:
        read: Returns them.
    """

    _read: Callable[[], Tensor] | None
    _rows: Tensor | None
    _chances: Sequence[float]

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self.__dict__.update(_read=read, _rows=None, _chances=())  # the base class is frozen

    def drop(self, chances: Sequence[float]) -> None:
        """Frees the distributions of a verified draft, of which only the probability of each node's token is kept."""
        self.__dict__.update(_read=None, _chances=chances)

    @property
    def probs(self) -> Tensor:
        if self._rows is None:
            if self._read is None:
                raise ValueError("the device verified this draft, and its distributions are not kept")
            self.__dict__.update(_rows=self._read(), _read=None)
        assert self._rows is not None
        return self._rows

    def chance(self, node: int, row: int, token: int) -> float:
        """Returns the probability with which a node's token was sampled from a row."""
        return self._chances[node] if self._chances else float(self.probs[row, token])


class SampledElsewhere(Elsewhere, Sampled):
    """``Sampled`` with distributions on a device."""


@dataclass(frozen=True, slots=True)
class WithoutReplacement:
    """Like ``Sampled``, but siblings were sampled one after another without replacement (Sequoia, 2402.12374)."""

    probs: Tensor  # [rows, V]


class WithoutReplacementElsewhere(Elsewhere, WithoutReplacement):
    """``WithoutReplacement`` with distributions on a device."""


@dataclass(frozen=True, slots=True)
class TopPlusSampled:
    """The k-1 most probable tokens of a row, then one sampled from the remaining tokens (2502.18779)."""

    probs: Tensor  # [rows, V]


class TopPlusSampledElsewhere(Elsewhere, TopPlusSampled):
    """``TopPlusSampled`` with distributions on a device."""


LawElsewhere = SampledElsewhere | WithoutReplacementElsewhere | TopPlusSampledElsewhere
ProposalLaw = PointMass | Sampled | WithoutReplacement | TopPlusSampled


@dataclass(frozen=True, slots=True)
class Decision:
    """The draft policy's numbers behind a draft.

    Attributes:
        sources: The source of each node, by name.
        candidates: Number of candidates of all sources, of which the nodes were selected.
        expected: Expected accepted tokens.
        price: Price of the draft's rows, in tokens of the usual speed.
        speedup: The usual speed, as a multiple of that of plain decoding.
    """

    sources: tuple[str, ...]
    candidates: int
    expected: float
    price: float
    speedup: float


@dataclass(frozen=True)
class Draft:
    """A tree of draft tokens below the last committed token of one sequence.

    A chain has parents (-1, 0, 1, ...). The empty draft is legal and means plain decoding.

    Args:
        ids: The draft tokens, parents before children.
        parents: Index of each node's parent. -1 is the root, the last committed token.
        law: Distribution of the tokens. It decides which verifier is exact.
        scores: Confidence in each node (log-probability of its path) for controllers and viewers, or None. Verifiers
            never read it.
        levels: Draft-model passes used, when fewer than the budget; 0 if no model drafted.
        decision: Numbers behind the draft, if a draft policy decided. Verifiers never read it.

    Attributes:
        depths: Depth of each node. Children of the root have depth 1.
    """

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    law: ProposalLaw = field(default_factory=PointMass)
    scores: tuple[float, ...] | None = None
    levels: int | None = None
    decision: Decision | None = None
    depths: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ids):
            raise ValueError(f"{len(self.parents)} parents for {len(self.ids)} tokens")
        depths: list[int] = []
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"each parent must come before its child, -1 the root; got {self.parents}")
            depths.append(1 if parent < 0 else depths[parent] + 1)
        object.__setattr__(self, "depths", tuple(depths))

    @staticmethod
    def empty() -> Draft:
        """Returns the draft without tokens."""
        return _EMPTY

    @staticmethod
    def chain(tokens: Sequence[int] | Tensor, law: ProposalLaw | None = None) -> Draft:
        """Returns a single path of draft tokens. The default ``law`` is that of fixed candidates."""
        ids = tuple(tokens.tolist()) if isinstance(tokens, Tensor) else tuple(tokens)
        return Draft(ids, tuple(range(-1, len(ids) - 1)), law or PointMass())

    @staticmethod
    def tree(ids: Sequence[int], parents: Sequence[int], scores: Sequence[float] | None = None) -> Draft:
        """Returns a tree of fixed candidates."""
        return Draft(tuple(ids), tuple(parents), scores=None if scores is None else tuple(scores))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def unread(self) -> bool:
        """Whether the nodes are on a device, and the host has not read them."""
        return False

    @property
    def limit(self) -> int:
        """Maximum number of nodes: their number, unless they are on a device."""
        return len(self.parents)

    @property
    def tree_depth(self) -> int:
        """Maximum depth of a tree's nodes; 0 for a chain."""
        return 0 if self.is_chain else max(self.depths)

    @property
    def drawn(self) -> bool:
        """Whether the nodes were sampled, and the draft has their distributions."""
        return not isinstance(self.law, PointMass)

    def read(self) -> Draft:
        """Returns this draft in the host's memory."""
        return self

    def decided(self, levels: int, decide: Callable[[Draft], Decision]) -> Draft:
        """Returns the draft with the numbers behind it, and ``levels`` passes if it does not say how many."""
        return replace(self, levels=levels if self.levels is None else self.levels, decision=decide(self))

    def peek(self) -> tuple[Sequence[int], Sequence[int]]:
        """Returns tokens and parents of up to ``limit`` nodes, also of a draft that stays on a device."""
        return self.ids, self.parents

    @cached_property
    def tokens(self) -> Tensor:
        return torch.tensor(self.ids, dtype=torch.int64)

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return not self.depths or self.depths[-1] == len(self.depths)

    def chance(self, node: int) -> float | None:
        """Returns the probability with which the token of ``node`` was sampled, None for a fixed candidate."""
        if isinstance(self.law, PointMass):
            return None
        if isinstance(self.law, Elsewhere):
            return self.law.chance(node, self.parents[node] + 1, self.ids[node])
        return float(self.law.probs[self.parents[node] + 1, self.ids[node]])

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node in order. Entry 0 is the root's, entry i + 1 node i's."""
        lists: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            lists[parent + 1].append(node)
        return tuple(map(tuple, lists))

    def below(self, node: int) -> list[int]:
        """Returns the children of one node in order, -1 for the root's."""
        return [child for child in range(node + 1, len(self.parents)) if self.parents[child] == node]

    @cached_property
    def ancestors(self) -> Tensor:
        """The tree's attention mask, bool [n, n]: entry (i, j) is whether node j is node i or its ancestor."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def path(self, node: int) -> tuple[int, ...]:
        """Returns the nodes from the root's child down to ``node``; empty for the root (-1)."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))


_EMPTY = Draft((), ())


def log_scores(probabilities: Iterable[float]) -> tuple[float, ...]:
    """Returns the scores of nodes that are reached with these probabilities."""
    return tuple([math.log(max(probability, 1e-30)) for probability in probabilities])
