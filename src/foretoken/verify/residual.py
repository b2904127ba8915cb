"""What all rules that use the draft's own law share: its rows, the ratio p/q, and the rest (p - q)+."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.law import PointMass
from foretoken.core.native import laws as native
from foretoken.verify.rows import Probs


def drawn_rows(draft: Draft, probs: Probs) -> Tensor:
    """q: [rows, V], row r the law at node r - 1 that the draft's tokens were drawn from.

    Raises ValueError for fixed candidates, which have no q, and for rows that do not fit ``probs`` [n+1, V].
    """
    if len(draft) == 0:
        return torch.empty(0, probs.shape[1])
    if isinstance(draft.law, PointMass):
        raise ValueError("this rule needs the law the tokens were drawn from, but the draft holds fixed candidates")
    q = draft.law.probs
    needed = max(draft.parents) + 2
    if q.ndim != 2 or q.shape[0] < needed or q.shape[1] != probs.shape[1]:
        raise ValueError(f"draft law of shape {tuple(q.shape)}; expected [{needed} or more, {probs.shape[1]}]")
    return q


def ratio(p: float, q: float) -> float:
    """p/q; 0 where p = 0, so that what the target forbids is never accepted, and 0 where q cannot have drawn it.

    A NaN in ``p`` counts as 0: the draw that follows the rejection then fails loudly.
    """
    return p / q if p > 0.0 and q > 0.0 else 0.0


def excess(p: Tensor, q: Tensor, weight: float = 1.0) -> tuple[Tensor, float]:
    """(weight p - q)+ in float64 [V], and its mass as the sum of its own entries.

    The mass is never had by subtracting from 1: where p and q nearly agree that leaves only rounding.
    """
    if kernels := native.for_weights(p, q):
        return kernels.excess(p, q, weight)
    rest = (p.double() * weight).sub_(q).clamp_(min=0.0)
    return rest, float(rest.sum())


def normalised(weights: Tensor) -> Tensor:
    """``weights`` over their own sum, float64; all zeros stay zeros, a law that can draw nothing."""
    weights = weights.double()
    mass = weights.sum()
    return weights / mass if float(mass) > 0.0 else weights
