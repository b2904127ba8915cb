"""Cluster-robust intervals: tokens of one request are correlated, so requests are the sampling unit.

A ratio of sums over requests is estimated by the ratio of the sums. Its variance is that of the delete-one jackknife,
which is the linearised cluster-robust variance with each residual over 1 - its leverage. Student's t gives the width,
with Satterthwaite's degrees of freedom for requests of unequal length (Bell and McCaffrey 2002): n - 1 for equal ones,
fewer where a long one dominates.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.core.checks import number
from foretoken.core.errors import InvalidRequest

Reals = NDArray[np.float64]

LEVEL = 0.95  # of all intervals of a plan


class Interval(NamedTuple):
    """An estimate and its confidence interval, which is infinite for one request."""

    estimate: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Half its width relative to the estimate."""
        return (self.high - self.low) / 2 / self.estimate


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], level: float = LEVEL) -> Interval:
    """Returns sum(numerators) / sum(denominators) with its interval at a confidence ``level``.

    Args:
        numerators: One per request, for example tokens.
        denominators: One per request, for example steps. Requests in which both are 0 are skipped.

    Raises:
        InvalidRequest: The numbers of both differ, values are not finite, or denominators are negative or all 0.
    """
    number("level", level, 0.0, 1.0 - 1e-12)
    top, bottom = _column(numerators), _column(denominators)
    if len(top) != len(bottom):
        raise InvalidRequest(
            f"one of each for every request is needed, got {len(top)} numerators, {len(bottom)} others"
        )
    if bool((bottom < 0.0).any()) or not bottom.sum() > 0.0:
        raise InvalidRequest(f"denominators must not be negative and not all be 0, got {bottom.tolist()}")
    used = (top != 0.0) | (bottom != 0.0)
    top, bottom = top[used], bottom[used]
    estimate, others = float(top.sum() / bottom.sum()), bottom.sum() - bottom
    if len(top) < 2 or not others.min() > 0.0:
        return Interval(estimate, -math.inf, math.inf)
    shifts, count = (top - estimate * bottom) / others, len(top)  # of the estimate when each request is omitted
    error = float(np.sqrt((count - 1) / count * np.square(shifts).sum()))
    half = student_quantile(0.5 + level / 2, _freedom(bottom)) * error
    return Interval(estimate, estimate - half, estimate + half)


def student_quantile(probability: float, freedom: float) -> float:
    """Returns t with P(T <= t) = ``probability`` for Student's t distribution.

    Fractional degrees of freedom are interpolated linearly in their inverse, which is slightly conservative. Fewer than
    one counts as one.
    """
    number("probability", probability, 0.5, 1.0 - 1e-13)
    number("freedom", freedom, 0.0)
    below = max(1, math.floor(freedom))
    if freedom <= below:
        return _whole_quantile(probability, below)
    share = (1 / below - 1 / freedom) * below * (below + 1)
    return (1 - share) * _whole_quantile(probability, below) + share * _whole_quantile(probability, below + 1)


@lru_cache(maxsize=256)
def _whole_quantile(probability: float, degrees: int) -> float:
    high = 1.0
    while 0.5 + _central(high, degrees) / 2 < probability:
        high *= 2
    return root(lambda t: 0.5 + _central(t, degrees) / 2 - probability, high / 2 if high > 1.0 else 0.0, high)


def _central(t: float, degrees: int) -> float:
    """P(|T| <= t) for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine, total = math.cos(angle) ** 2, 0.0
    first, term = (2, math.cos(angle)) if degrees % 2 else (1, 1.0)
    for power in range(first, degrees, 2):
        total += term
        term *= cosine * power / (power + 1)
    series = math.sin(angle) * total
    return (angle + series) * 2 / math.pi if degrees % 2 else series


def _column(values: Sequence[float]) -> Reals:
    column = np.asarray(values, dtype=np.float64)
    if column.ndim != 1 or not np.isfinite(column).all():
        raise InvalidRequest(f"one finite number for every request is needed, got {values!r}")
    return column


def _freedom(sizes: Reals) -> float:
    """Returns the degrees of freedom of the jackknife variance v, 2 E[v]^2 / Var[v], for ratios of one variance.

    With shares w, v is a quadratic form r' M' D M r in the ratios r, with M = I - 1 w' and D the diagonal of
    (w / (1 - w))^2. Its degrees of freedom are tr(D M M')^2 / tr((D M M')^2).
    """
    share = sizes / sizes.sum()
    scale = np.square(share / (1.0 - share))
    inner = np.eye(len(share)) - share[:, None] - share[None, :] + share @ share
    return float((scale @ np.diag(inner)) ** 2 / (scale @ np.square(inner) @ scale))


def root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Returns the root of an increasing function by bisection."""
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (low, middle) if rising(middle) > 0.0 else (middle, high)
    return high


def standard_deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation of normal values from their median deviation, which outliers hardly change."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def around(mean: float, width: float) -> tuple[float, float]:
    """Returns the ends of an interval that reaches ``width`` to both sides of ``mean`` in the logarithm."""
    return mean * math.exp(-width), mean * (math.exp(width) if width < 700.0 else math.inf)
