"""Chains and trees that a model drafts in one call: what is asked for, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foretoken.core.native.sampling import Filter


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """Where a greedy chain ends: before the first token that is reached less likely than its floor.

    A token that the model gives probability p is accepted at the rate ``bases[i] + slopes[i] * p``, where i is the
    number of ``bounds`` up to p. It is reached with the product of the rates of all tokens up to it.

    Attributes:
        bounds: [buckets - 1], ascending.
        bases: [buckets].
        slopes: [buckets].
        floors: By depth; the last one also holds for all deeper tokens.
    """

    bounds: Sequence[float]
    bases: Sequence[float]
    slopes: Sequence[float]
    floors: Sequence[float]


@dataclass(frozen=True, slots=True)
class Draws:
    """How the tokens of a chain are drawn.

    Attributes:
        kept: Temperature and filters of the distributions.
        uniforms: Numbers in (0, 1), one for each token, which is drawn by inverse-CDF sampling.
        keys: In their place, the keys of exponential races (``core.streams.SharedStream``).
        rows: Whether the distributions are returned.
    """

    kept: Filter
    uniforms: Sequence[float] = ()
    keys: Sequence[int] = ()
    rows: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """The tokens that a model may draft.

    Attributes:
        size: The first logits are theirs, so many.
        width: Number of tokens of the distributions that they are drawn from.
        ids: int32 [size], ascending; the token of each logit. None: its number.
    """

    size: int
    width: int
    ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The shape of a tree of fixed candidates (2406.16858, section 4).

    Attributes:
        width: Candidates of a node, and nodes expanded on a level.
        steps: Levels.
        temperature: Temperature of the probabilities that candidates are ranked by, above 0.
        floor: Score below which a node is not expanded.
    """

    width: int
    steps: int
    temperature: float
    floor: float = -math.inf


@dataclass(frozen=True, slots=True)
class ChainRequest:
    """A chain or tree to draft.

    Attributes:
        limit: The largest number of tokens, at least 1.
        draws: How tokens are drawn; None takes the likeliest ones.
        end: Where a chain of likeliest tokens ends before; None for nowhere.
        tree: The shape of a tree of likely tokens; None for a chain.
    """

    limit: int
    draws: Draws | None = None
    end: ChainEnd | None = None
    tree: TreeShape | None = None

    @property
    def rows(self) -> int:
        """The largest number of rows that drafting computes behind the sequence's own."""
        return self.limit - 1 if self.tree is None else (self.tree.steps - 1) * self.tree.width

    @property
    def widest(self) -> int:
        """The largest number of rows of a level."""
        return 1 if self.tree is None else self.tree.width


@dataclass(frozen=True, slots=True)
class ModelChain:
    """A chain or tree that a model drafted.

    Attributes:
        tokens: The tokens.
        ended: Whether the chain has fewer tokens than it might: the next one would be unlikely, or none is possible.
        candidates: Of a chain of likeliest tokens: the tokens, with the one before which the chain ended.
        probabilities: What the model gives each of ``candidates``; of a tree the scores of ``tokens``.
        rows: float32 [tokens, vocabulary], the distribution that each was drawn from, if they were asked for.
        parents: Of a tree: the node above each token, -1 for none.
    """

    tokens: list[int]
    ended: bool
    candidates: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    rows: Tensor | None = None
    parents: list[int] = field(default_factory=list)
