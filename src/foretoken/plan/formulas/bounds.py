"""Bounds on the acceptance a = sum min(p, q) = 1 - TV from statistics that are cheaper than the overlap itself.

Entropies and divergences are in nats. Statistics are tensors or numbers. Every bound on a holds for a single row and,
by Jensen's inequality, for means over rows: the mean statistic gives a bound on the mean acceptance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.checks import integer, number
from foretoken.plan.formulas.acceptance import Rows, normalized

Statistic = Tensor | float


@dataclass(frozen=True, slots=True)
class Bounds:
    """Elementwise bounds: low <= a <= high."""

    low: Tensor
    high: Tensor


def divergence(p: Rows, q: Rows) -> Tensor:
    """KL(p||q) = sum p log(p/q). Infinite where q is 0 and p is not. Either direction bounds a."""
    p, q = normalized(p), normalized(q)
    return torch.where(p > 0, p * (p.log() - q.log()), 0.0).sum(-1).clamp(min=0.0)


def entropy(p: Rows) -> Tensor:
    """H(p) = -sum p log p."""
    return torch.special.entr(normalized(p)).sum(-1)


def bhattacharyya(p: Rows, q: Rows) -> Tensor:
    """BC = sum sqrt(p q): 0 for distributions without a common token, 1 for equal ones."""
    return (normalized(p) * normalized(q)).sqrt().sum(-1).clamp(max=1.0)


def pinsker(kl: Statistic) -> Tensor:
    """a >= 1 - sqrt(KL/2). Tighter than Bretagnolle-Huber below KL = 1.6, vacuous from 2 on."""
    return (1.0 - (_real(kl) / 2.0).sqrt()).clamp(min=0.0)


def bretagnolle_huber(kl: Statistic) -> Tensor:
    """a >= 1 - sqrt(1 - exp(-KL)), positive for any finite KL."""
    return 1.0 - (-torch.expm1(-_real(kl))).sqrt()


def from_divergence(kl: Statistic) -> Tensor:
    """The tighter of both lower bounds. There is no upper bound: with any large KL the overlap may be nearly 1."""
    return torch.maximum(pinsker(kl), bretagnolle_huber(kl))


def from_bhattacharyya(overlap: Statistic) -> Bounds:
    """1 - sqrt(1 - BC^2) <= a <= BC."""
    overlap = _real(overlap)
    return Bounds(1.0 - (1.0 - overlap.square()).clamp(min=0.0).sqrt(), overlap)


def from_draft_entropy(draft_entropy: Statistic, scale: float = 0.2) -> Tensor:
    """a >= 1 - sqrt(scale H(q)), wherever KL(q||p) <= 2 scale H(q) (AdaEDL, 2410.18351).

    The draft's entropy alone bounds nothing: the premise, that the cross entropy is at most 1 + 2 scale times the
    entropy, must be measured for a pair. The paper's scale is 0.2.
    """
    number("scale", scale, 0.0)
    return (1.0 - (scale * _real(draft_entropy)).sqrt()).clamp(min=0.0)


def from_entropies(target_entropy: Statistic, draft_entropy: Statistic, vocabulary: int) -> Tensor:
    """a <= 1 - t with |H(p) - H(q)| = t log(V-1) + h(t), h the binary entropy (Fannes 1973, Audenaert 2007).

    Distributions with different entropies cannot be equal; equal entropies imply nothing.
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
    """max p >= exp(-H(p)): a lower bound on the acceptance of a draft that always proposes the target's argmax."""
    return torch.exp(-_real(target_entropy))


def coupled_from_variation(variation: Statistic) -> Bounds:
    """(1 - TV) / (1 + TV) <= P(match) <= 1 - TV for coupled verification with one child (2408.07978)."""
    variation = _real(variation)
    return Bounds((1.0 - variation) / (1.0 + variation), 1.0 - variation)


def _binary(t: Tensor) -> Tensor:
    return torch.special.entr(t) + torch.special.entr(1.0 - t)


def _real(statistic: Statistic) -> Tensor:
    return torch.as_tensor(statistic, dtype=torch.float64)
