"""Distributions of draft tokens. The verifier is chosen by their type, so it is a closed sum type and never a flag."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class WithoutReplacement:
    """Like ``Sampled``, but siblings were sampled one after another without replacement (Sequoia, 2402.12374)."""

    probs: Tensor  # [rows, V]


@dataclass(frozen=True, slots=True)
class TopPlusSampled:
    """The k-1 most probable tokens of a row, then one sampled from the remaining tokens (2502.18779)."""

    probs: Tensor  # [rows, V]


ProposalLaw = PointMass | Sampled | WithoutReplacement | TopPlusSampled
