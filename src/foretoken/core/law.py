"""How drafted tokens were come by. The verifier is chosen from this, so it is a closed sum and never a flag."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PointMass:
    """Fixed candidates: no randomness a verifier needs to know of (n-gram, suffix, argmax draft, top-k tree).

    Also the law of candidates drawn with the noise that the target will use (the trajectory grade), where
    the emitted token does not depend on how the candidate was made.
    """


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens drawn independently from ``probs``; children of one node i.i.d. from that node's row.

    ``probs[r]`` is the law at node ``r - 1``: row 0 at the root, as in the target's own rows. It is the very
    row the token was drawn from, after temperature and filters, never computed again.
    """

    probs: Tensor  # [rows, V]


@dataclass(frozen=True, slots=True)
class WithoutReplacement:
    """As ``Sampled``, but siblings were drawn one after another without replacement (2402.12374)."""

    probs: Tensor  # [rows, V]


@dataclass(frozen=True, slots=True)
class TopPlusSampled:
    """The k-1 most probable tokens of a row, then one drawn from the rest (2502.18779)."""

    probs: Tensor  # [rows, V]


ProposalLaw = PointMass | Sampled | WithoutReplacement | TopPlusSampled
