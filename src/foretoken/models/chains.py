"""Chains and trees that a model drafts in one call: requests and results."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.context import ChainEnd as ChainEnd
from foretoken.core.draft import LawElsewhere
from foretoken.core.native.sampling import Adjustment, Filter

TREE_KINDS = ("ranked", "sampled", "greedy_multi")
# Estimates for sampled trees, measured with a 1 M draft of a 15 M target. Acceptance of a sampled token x: about
# MIN_FIRST + (MAX_FIRST - MIN_FIRST) q(x)^2; of a later sibling after those before it were rejected: LATER; of a first
# child not sampled yet: TYPICAL.
MIN_FIRST, MAX_FIRST = 0.5, 0.95
LATER = (0.28, 0.19, 0.14, 0.1)
TYPICAL = 0.7


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling of a draft's tokens. Without random numbers, a ranked tree has the most probable ones."""

    kept: Filter  # temperature and filters of the distributions
    uniforms: Sequence[float] = ()  # numbers in (0, 1), one for each token, for inverse-CDF sampling
    # keys of exponential races (``core.streams.SharedStream``) that replace ``uniforms``, one for each level
    keys: Sequence[int] = ()
    rows: bool = False  # whether the distributions are returned

    @property
    def random(self) -> bool:
        return bool(self.uniforms or self.keys)


class ScoredRows(NamedTuple):
    """Rows whose next tokens a score estimates."""

    probs: Tensor  # [n, V], the draft's distributions; of greedy drafts, those at temperature 1
    hidden: Tensor | None  # [n, H], the hidden states that a score reads
    tokens: Tensor  # int64 [n], the tokens before
    greedy: Tensor  # bool [n], whether the drafts are greedy


@dataclass(frozen=True, slots=True)
class DraftStop:
    """A score, and where a chain ends by it."""

    # estimates the acceptance [n] in [0, 1] of the next tokens, without the host where a device calls it
    score: Callable[[ScoredRows], Tensor]
    threshold: float  # acceptance of the chain below which it ends where the draft policy sets no minimum
    hidden: bool = False  # whether the score reads hidden states
    each: bool = False  # whether ``threshold`` is of each token rather than of all tokens so far


class TokenLogits(Protocol):
    """Logits that a token adds to those behind it, computed by the kernels (DSpark, 2607.05147)."""

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of its model without layers, and of the memory of its passes."""
        ...

    @property
    def kinds(self) -> set[int]: ...


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """The tokens that a model may draft."""

    size: int  # number of leading logits that belong to them
    width: int  # number of tokens of the distributions that they are sampled from
    ids: Tensor | None = None  # int32 [size], ascending; the token of each logit; None if it is the logit's index
    successors: TokenLogits | None = None  # logits that a token adds to those behind it; None for none
    # the same where torch computes them: from tokens, int64 [n], and states of the rows, [n, H], to float32 [n, V]
    after: Callable[[Tensor, Tensor | None], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The shape of a tree."""

    width: int  # children of a node, and nodes of a ranked tree that are expanded on a level
    steps: int  # levels
    # temperature of the probabilities that candidates are ranked by, above 0, unless the request has ``Draws``
    temperature: float = 1.0
    floor: float = -math.inf  # minimum score of a node that is expanded
    # one of ``TREE_KINDS``: fixed candidates (2406.16858, section 4), siblings sampled without replacement, or the most
    # probable ones and one sampled
    kind: str = "ranked"


@dataclass(frozen=True, slots=True)
class ChainRequest:
    """A chain or tree to draft."""

    limit: int  # the largest number of tokens, at least 1
    draws: Draws | None = None  # sampling of tokens; None takes the likeliest ones
    end: ChainEnd | None = None  # early end of a chain of likeliest tokens; None for none
    tree: TreeShape | None = None  # the shape of a tree; None for a chain
    # returns the changes of logits at the root, by the size of the vocabulary; tokens add theirs
    changes: Callable[[int], Adjustment] | None = None
    # returns the mask of the tokens that are possible at the root, in place of those of ``changes``, where the host
    # alone knows the masks of other nodes; None if tokens add all changes
    possible: Callable[[int], NDArray[np.bool_]] | None = None
    stop: DraftStop | None = None  # ends a chain early, whatever its tokens are; None for none

    @property
    def rows(self) -> int:
        """The largest number of rows that drafting computes after the sequence's."""
        ranked = self.tree is not None and self.tree.kind == "ranked"
        return (self.tree.steps - 1) * self.tree.width if self.tree is not None and ranked else self.limit - 1

    @property
    def levels(self) -> int:
        return self.limit if self.tree is None else self.tree.steps

    @property
    def widest(self) -> int:
        """The largest number of rows of a level."""
        if self.tree is None:
            return 1
        return self.tree.width if self.tree.kind == "ranked" else self.limit


@dataclass(frozen=True, slots=True)
class ModelChain:
    """A chain or tree that a model drafted."""

    tokens: list[int]
    ended: bool  # whether the chain ended early: the next token was unlikely, or no token is possible
    # tokens of a chain of likeliest tokens, with the one before which it ended
    candidates: list[int] = field(default_factory=list)
    # the model's probabilities of ``candidates``; for a tree the scores of ``tokens``
    probabilities: list[float] = field(default_factory=list)
    # float32 [tokens, vocabulary], the distribution of each sampled token, if requested; of a tree, those of the root's
    # children and of each node's, up to the last node that has any; or a law that reads them
    rows: Tensor | LawElsewhere | None = None
    parents: list[int] = field(default_factory=list)  # parent of each token of a tree, -1 for none
