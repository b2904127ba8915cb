"""What cheaper statistics than the overlap itself say of acceptance: bounds on a = sum min(p, q) = 1 - TV.

Entropies and divergences are in nats, and statistics come as tensors or numbers. Every bound on a holds for a single
row and, by Jensen, for means over rows: put in the mean statistic, get a bound on the mean acceptance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.checks import integer, number
from foretoken.plan.formulas.acceptance import Law, law

Statistic = Tensor | float


@dataclass(frozen=True, slots=True)
class Bounds:
    """low <= a <= high, entry by entry."""

    low: Tensor
    high: Tensor


def divergence(p: Law, q: Law) -> Tensor:
    """KL(p||q) = sum p log(p/q); infinite where q forbids what p allows. Either direction bounds a."""
    p, q = law(p), law(q)
    return torch.where(p > 0, p * (p.log() - q.log()), 0.0).sum(-1).clamp(min=0.0)


def entropy(p: Law) -> Tensor:
    """H(p) = -sum p log p."""
    return torch.special.entr(law(p)).sum(-1)


def bhattacharyya(p: Law, q: Law) -> Tensor:
    """BC = sum sqrt(p q), 0 for laws that share nothing and 1 for equal ones."""
    return (law(p) * law(q)).sqrt().sum(-1).clamp(max=1.0)


def pinsker(kl: Statistic) -> Tensor:
    """a >= 1 - sqrt(KL/2), the better one under KL = 1.6; says nothing from 2 on."""
    return (1.0 - (_real(kl) / 2.0).sqrt()).clamp(min=0.0)


def bretagnolle_huber(kl: Statistic) -> Tensor:
    """a >= 1 - sqrt(1 - exp(-KL)), which is above 0 for any finite KL."""
    return 1.0 - (-torch.expm1(-_real(kl))).sqrt()


def from_divergence(kl: Statistic) -> Tensor:
    """The better of both. From below only: laws of any large KL may overlap nearly wholly."""
    return torch.maximum(pinsker(kl), bretagnolle_huber(kl))


def from_bhattacharyya(overlap: Statistic) -> Bounds:
    """1 - sqrt(1 - BC^2) <= a <= BC."""
    overlap = _real(overlap)
    return Bounds(1.0 - (1.0 - overlap.square()).clamp(min=0.0).sqrt(), overlap)


def from_draft_entropy(draft_entropy: Statistic, scale: float = 0.2) -> Tensor:
    """a >= 1 - sqrt(scale H(q)), wherever KL(q||p) <= 2 scale H(q) (AdaEDL, 2410.18351).

    The draft's entropy alone bounds nothing: the premise, that cross entropy is at most 1 + 2 scale times the entropy,
    is a statement about a pair that has to be measured. The paper's scale is 0.2.
    """
    number("scale", scale, 0.0)
    return (1.0 - (scale * _real(draft_entropy)).sqrt()).clamp(min=0.0)


def from_entropies(target_entropy: Statistic, draft_entropy: Statistic, vocabulary: int) -> Tensor:
    """a <= 1 - t with |H(p) - H(q)| = t log(V-1) + h(t), h the binary entropy (Fannes 1973, Audenaert 2007).

    Laws whose entropies differ cannot agree; equal entropies promise nothing.
    """
    integer("vocabulary", vocabulary, 2)
    gap = (_real(target_entropy) - _real(draft_entropy)).abs()
    low, high = torch.zeros_like(gap), torch.full_like(gap, 1.0 - 1.0 / vocabulary)
    for _ in range(60):
        middle = (low + high) / 2
        above = middle * math.log(vocabulary - 1) + _binary(middle) > gap
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return 1.0 - low


def argmax_from_entropy(target_entropy: Statistic) -> Tensor:
    """max p >= exp(-H(p)): what a draft that always names the target's likeliest token has accepted at least."""
    return torch.exp(-_real(target_entropy))


def coupled_from_variation(variation: Statistic) -> Bounds:
    """(1 - TV) / (1 + TV) <= P(match) <= 1 - TV for the trajectory grade with one child (2408.07978)."""
    variation = _real(variation)
    return Bounds((1.0 - variation) / (1.0 + variation), 1.0 - variation)


def _binary(t: Tensor) -> Tensor:
    return torch.special.entr(t) + torch.special.entr(1.0 - t)


def _real(statistic: Statistic) -> Tensor:
    return torch.as_tensor(statistic, dtype=torch.float64)
