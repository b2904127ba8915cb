"""Shared parts of the verifiers for sampled drafts: the rows of q, the ratio p/q, and the excess (p - q)+."""

import torch
from torch import Tensor

from foretoken.core.draft import Draft, PointMass
from foretoken.core.native import sampling as native
from foretoken.verify.rows import Probs


def drawn_rows(draft: Draft, probs: Probs) -> Tensor:
    """Returns q [rows, V]. Row r is the distribution at node r - 1 that the draft's tokens were sampled from.

    Raises ValueError if the draft holds fixed candidates, which have no q, or q does not fit ``probs`` [n+1, V].
    """
    if len(draft) == 0:
        return torch.empty(0, probs.shape[1])
    if isinstance(draft.law, PointMass):
        raise ValueError("this verifier needs the distribution of the draft, but the draft holds fixed candidates")
    q = draft.law.probs
    needed = max(draft.parents) + 2
    if q.ndim != 2 or q.shape[0] < needed or q.shape[1] != probs.shape[1]:
        raise ValueError(f"draft law of shape {tuple(q.shape)}; expected [{needed} or more, {probs.shape[1]}]")
    return q


def ratio(p: float, q: float) -> float:
    """Returns p/q; 0 for p = 0, so that forbidden tokens are never accepted, and for q = 0.

    A NaN in ``p`` counts as 0: the draw that follows the rejection then raises.
    """
    return p / q if p > 0.0 and q > 0.0 else 0.0


def excess(p: Tensor, q: Tensor, weight: float = 1.0) -> tuple[Tensor, float]:
    """Returns (weight p - q)+ in float64 [V], and its mass as the sum of its entries.

    The mass is not computed as a difference from 1: if p and q nearly agree, only rounding errors would remain.
    """
    if kernels := native.for_weights(p, q):
        return kernels.excess(p, q, weight)
    residual = (p.double() * weight).sub_(q).clamp_(min=0.0)
    return residual, float(residual.sum())


def normalized(weights: Tensor) -> Tensor:
    """Returns ``weights`` divided by their sum, float64. All zeros stay zeros, from which nothing can be sampled."""
    weights = weights.double()
    mass = weights.sum()
    return weights / mass if float(mass) > 0.0 else weights
