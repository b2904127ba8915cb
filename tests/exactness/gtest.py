"""The likelihood-ratio test of sampled texts against an exact distribution, with its power.

n draws from a law at total variation delta have noncentrality at least 4 n delta^2 (Cauchy-Schwarz: the sum of
(a - b)^2 / b is at least the square of the sum of |a - b|). So ``draws_needed`` holds for every wrong law at
that distance, not for a chosen one: about 18/delta^2 for 80 degrees of freedom, alpha 1e-3 and power 0.9.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import ceil, log

from scipy import optimize, stats


@dataclass(frozen=True)
class GResult:
    """statistic: G = 2 sum O log(O/E). delta: the total variation this test detects with power 0.9 at alpha 1e-3,
    pooled cells counting as one.
    """

    statistic: float
    dof: int
    p_value: float
    draws: int
    delta: float


def g_test(counts: Mapping[Hashable, int], law: Mapping[Hashable, float], smallest: float = 5.0) -> GResult:
    """Test ``counts`` against ``law``; cells that expect fewer than ``smallest`` draws are pooled into one.

    A draw that the law calls impossible has p-value 0.
    """
    n = sum(counts.values())
    if n == 0:
        raise ValueError("no draws to test")
    if any(law.get(cell, 0.0) <= 0.0 for cell, count in counts.items() if count):
        return GResult(float("inf"), 0, 0.0, n, 0.0)
    cells: list[tuple[float, float]] = []
    pooled = [0.0, 0.0]
    for cell, p in law.items():
        if n * p >= smallest:
            cells.append((counts.get(cell, 0), n * p))
        elif p > 0.0:
            pooled[0] += counts.get(cell, 0)
            pooled[1] += n * p
    if pooled[1] > 0.0:
        cells.append((pooled[0], pooled[1]))
    statistic = 2.0 * sum(o * log(o / e) for o, e in cells if o)
    dof = len(cells) - 1
    p_value = float(stats.chi2.sf(statistic, dof)) if dof else 1.0
    return GResult(statistic, dof, p_value, n, (noncentrality(dof) / (4 * n)) ** 0.5 if dof else 1.0)


def noncentrality(dof: int, alpha: float = 1e-3, power: float = 0.9) -> float:
    """The noncentrality that a chi-square test with ``dof`` degrees of freedom detects with ``power``."""
    critical = stats.chi2.isf(alpha, dof)
    return float(optimize.brentq(lambda nc: stats.ncx2.sf(critical, dof, nc) - power, 1e-6, 10.0 * critical + 100.0))


def draws_needed(delta: float, cells: int, alpha: float = 1e-3, power: float = 0.9) -> int:
    """Draws that detect any law at total variation ``delta`` with ``power`` at level ``alpha``."""
    return ceil(noncentrality(cells - 1, alpha, power) / (4 * delta**2))


def draws_for(law: Mapping[Hashable, float], delta: float, smallest: float = 5.0) -> int:
    """Draws that detect any law at total variation ``delta`` from ``law``, pooled cells counting as one."""
    draws = draws_needed(delta, cells=len(law))
    while (fewer := draws_needed(delta, _cells(law, draws, smallest))) < draws:
        draws = fewer
    return draws


def _cells(law: Mapping[Hashable, float], draws: int, smallest: float) -> int:
    """Number of cells of a test of ``draws`` draws."""
    alone = sum(draws * p >= smallest for p in law.values())
    return alone + any(0.0 < draws * p < smallest for p in law.values())
