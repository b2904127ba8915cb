"""Chains that a model drafts in one call: what is asked for, and what it returns."""

from __future__ import annotations

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
class ChainRequest:
    """A chain to draft.

    Attributes:
        limit: The largest number of tokens, at least 1.
        draws: How tokens are drawn; None takes the likeliest ones.
        end: Where a chain of likeliest tokens ends before; None for nowhere.
    """

    limit: int
    draws: Draws | None = None
    end: ChainEnd | None = None


@dataclass(frozen=True, slots=True)
class ModelChain:
    """A chain that a model drafted.

    Attributes:
        tokens: The tokens.
        ended: Whether the chain has fewer tokens than it might: the next one would be unlikely, or none is possible.
        candidates: Of a chain of likeliest tokens: the tokens, with the one before which the chain ended.
        probabilities: What the model gives each of ``candidates``.
        rows: float32 [tokens, vocabulary], the distribution that each was drawn from, if they were asked for.
    """

    tokens: list[int]
    ended: bool
    candidates: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    rows: Tensor | None = None
