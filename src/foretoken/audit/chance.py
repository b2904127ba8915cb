"""Normal and chi-square tails, the G-test, and the power of these tests.

Power is stated at the level at which a test is used, a Bonferroni share of ``ALPHA``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

ALPHA = 1e-3  # probability of failing an exact implementation, over all tests of an audit
POWER = 0.9


@dataclass(frozen=True, slots=True)
class Fit:
    """A G-test. statistic: 2 sum O log(O/E). moved: the total variation between cells that it finds with ``POWER``.

    n samples from a distribution at total variation d have noncentrality at least 4 n d^2 (Cauchy-Schwarz), so
    ``moved`` holds for every wrong distribution at that distance.
    """

    statistic: float
    dof: int
    p_value: float
    moved: float


def g_test(observed: Sequence[float], expected: Sequence[float], level: float) -> Fit:
    """Returns the G-test of ``observed`` counts against ``expected`` ones.

    Cells that expect fewer than 5 samples are pooled, if necessary with the next smallest. A sample in a cell that
    expects none has p-value 0.
    """
    if any(o and e <= 0.0 for o, e in zip(observed, expected, strict=True)):
        return Fit(math.inf, 0, 0.0, 0.0)
    cells: list[tuple[float, float]] = []
    pool = (0.0, 0.0)
    for o, e in sorted(zip(observed, expected, strict=True), key=lambda cell: cell[1]):
        if pool[1] < 5.0:
            pool = (pool[0] + o, pool[1] + e)
        else:
            cells.append((o, e))
    cells.append(pool)
    dof = len(cells) - 1
    if dof < 1:
        return Fit(0.0, 0, 1.0, 1.0)
    statistic = 2.0 * sum(o * math.log(o / e) for o, e in cells if o)
    moved = math.sqrt(noncentrality(dof, level) / (4.0 * sum(e for _, e in cells)))
    return Fit(statistic, dof, chi2_tail(statistic, dof), min(1.0, moved))


def normal_tail(z: float) -> float:
    """Returns the two-sided p-value of a standard normal ``z``."""
    return math.erfc(abs(z) / math.sqrt(2.0))


@cache
def detectable(level: float) -> float:
    """Returns the shift, in standard errors, that a two-sided z-test at ``level`` finds with ``POWER``."""
    critical = _root(lambda z: level - normal_tail(z), 0.0, 40.0)
    return critical + _root(lambda z: 1.0 - POWER - normal_tail(z) / 2.0, 0.0, 9.0)


def chi2_tail(statistic: float, dof: int) -> float:
    """Returns P(chi-square with ``dof`` degrees of freedom > ``statistic``)."""
    half = torch.tensor([dof / 2.0, statistic / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@cache
def noncentrality(dof: int, level: float) -> float:
    """Returns the noncentrality that a chi-square test at ``level`` finds with ``POWER``."""
    critical = _root(lambda x: level - chi2_tail(x, dof), 0.0, 10.0 * dof + 200.0)
    return _root(lambda shift: _noncentral_tail(critical, dof, shift) - POWER, 0.0, 10.0 * critical + 200.0)


def _noncentral_tail(statistic: float, dof: int, shift: float) -> float:
    """Returns the tail of a noncentral chi-square: a Poisson mixture of central tails."""
    mean = shift / 2.0
    spread = 12.0 * math.sqrt(mean) + 40.0
    counts = torch.arange(max(0, int(mean - spread)), int(mean + spread), dtype=torch.float64)
    weights = (counts * math.log(mean) - mean - torch.lgamma(counts + 1.0)).exp() if mean else (counts == 0).double()
    tails = torch.special.gammaincc(dof / 2.0 + counts, torch.full_like(counts, statistic / 2.0))
    return float((weights * tails).sum())


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Returns the root of an increasing function by bisection."""
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (low, middle) if rising(middle) > 0.0 else (middle, high)
    return high
