"""Cluster-robust intervals: tokens of one request are correlated, so requests are the sampling unit.

A ratio of sums over requests is estimated by the ratio of the sums. Its variance is that of the delete-one jackknife,
which is the linearised cluster-robust variance with each residual over 1 - its leverage. Student's t gives the width,
with Satterthwaite's degrees of freedom for requests of unequal length (Bell and McCaffrey 2002): n - 1 for equal ones,
fewer where a long one dominates.
"""

from __future__ import annotations

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


class UncertainValue(NamedTuple):
    """An estimate, its standard error, and the degrees of freedom of the standard error."""

    estimate: float
    error: float
    freedom: float

    def interval(self, level: float) -> Interval:
        """Returns the confidence interval at ``level``."""
        half = student_quantile(0.5 + level / 2, self.freedom) * self.error if math.isfinite(self.error) else math.inf
        return Interval(self.estimate, self.estimate - half, self.estimate + half)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], level: float = LEVEL) -> Interval:
    """Returns sum(numerators) / sum(denominators) with its interval at a confidence ``level``.

    Args:
        numerators: One per request, for example tokens.
        denominators: One per request, for example steps. Requests in which both are 0 are skipped.

    Raises:
        InvalidRequest: The numbers of both differ, values are not finite, or denominators are negative or all 0.
    """
    number("level", level, 0.0, 1.0 - 1e-12)
    return _ratio(*_pairs(numerators, denominators)).interval(level)


def ratio_of_ratios(
    numerators: Sequence[float],
    denominators: Sequence[float],
    base_numerators: Sequence[float],
    base_denominators: Sequence[float],
    level: float = LEVEL,
    paired: bool = True,
) -> Interval:
    """Returns (sum a / sum b) / (sum c / sum d), for example a speed over another, with its interval.

    a, b, c and d are the arguments in their order, one per request. The interval is symmetric in the logarithm.

    Args:
        level: Confidence level.
        paired: Both sides have the same requests in the same order, so that their common variation cancels. Otherwise
            the sides are independent samples of any sizes (Welch).

    Raises:
        InvalidRequest: As ``ratio_interval``, or a sum is not positive.
    """
    number("level", level, 0.0, 1.0 - 1e-12)
    columns = numerators, denominators, base_numerators, base_denominators
    sides = _pairs(*columns[:2]), _pairs(*columns[2:])
    for top, bottom in sides:
        if not (top.sum() > 0.0 and bottom.sum() > 0.0):
            raise InvalidRequest("a ratio of ratios needs positive sums on both sides; got one that is not")
    if paired:
        if len(numerators) != len(base_numerators):
            raise InvalidRequest(
                f"paired ratios need the same requests on both sides, got {len(numerators)} and "
                f"{len(base_numerators)}: pass paired=False for independent samples"
            )
        spread = _paired(*map(_column, columns))
    else:
        spread = _independent(*(_relative(_ratio(*side)) for side in sides))
    estimate, low, high = spread.interval(level)
    return Interval(math.exp(estimate), exponential(low), exponential(high))


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


def _pairs(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[Reals, Reals]:
    top, bottom = _column(numerators), _column(denominators)
    if len(top) != len(bottom):
        raise InvalidRequest(
            f"one of each for every request is needed, got {len(top)} numerators, {len(bottom)} others"
        )
    if bool((bottom < 0.0).any()) or not bottom.sum() > 0.0:
        raise InvalidRequest(f"denominators must not be negative and not all be 0, got {bottom.tolist()}")
    used = (top != 0.0) | (bottom != 0.0)
    return top[used], bottom[used]


def _ratio(top: Reals, bottom: Reals) -> UncertainValue:
    """R = sum y / sum x. Omitting request i changes it by -(y_i - R x_i) / (sum x - x_i)."""
    estimate = float(top.sum() / bottom.sum())
    others = bottom.sum() - bottom
    if len(top) < 2 or not others.min() > 0.0:
        return UncertainValue(estimate, math.inf, 1)
    return UncertainValue(estimate, _jackknife((top - estimate * bottom) / others), _freedom(bottom))


def _jackknife(shifts: Reals) -> float:
    """Returns the standard error from the changes of the estimate when each request is omitted."""
    count = len(shifts)
    return float(np.sqrt((count - 1) / count * np.square(shifts).sum()))


def _freedom(sizes: Reals) -> float:
    """Returns the degrees of freedom of the jackknife variance v, 2 E[v]^2 / Var[v], for ratios of one variance.

    With shares w, v is a quadratic form r' M' D M r in the ratios r, with M = I - 1 w' and D the diagonal of
    (w / (1 - w))^2. Its degrees of freedom are tr(D M M')^2 / tr((D M M')^2).
    """
    share = sizes / sizes.sum()
    scale = np.square(share / (1.0 - share))
    inner = np.eye(len(share)) - share[:, None] - share[None, :] + share @ share
    return float((scale @ np.diag(inner)) ** 2 / (scale @ np.square(inner) @ scale))


def _relative(spread: UncertainValue) -> UncertainValue:
    """Returns the logarithm of an uncertain value."""
    return UncertainValue(math.log(spread.estimate), spread.error / spread.estimate, spread.freedom)


def _paired(a: Reals, b: Reals, c: Reals, d: Reals) -> UncertainValue:
    """Returns log (sum a / sum b) / (sum c / sum d). The jackknife omits a request on both sides."""
    columns = np.stack([a, b, c, d])
    columns = columns[:, (columns != 0.0).any(0)]
    sums = columns.sum(1)
    others, signs = sums[:, None] - columns, np.array([1.0, -1.0, -1.0, 1.0])
    estimate = float(signs @ np.log(sums))
    if columns.shape[1] < 2 or not others.min() > 0.0:
        return UncertainValue(estimate, math.inf, 1)
    freedom = min(_freedom(columns[1]), _freedom(columns[3]))
    return UncertainValue(estimate, _jackknife(signs @ np.log(others) - estimate), freedom)


def _independent(one: UncertainValue, other: UncertainValue) -> UncertainValue:
    """Returns the difference, with the degrees of freedom of Welch and Satterthwaite."""
    parts = one.error**2, other.error**2
    total = sum(parts)
    if not math.isfinite(total) or total == 0.0:
        return UncertainValue(one.estimate - other.estimate, math.sqrt(total), 1)
    freedom = total**2 / sum(part**2 / side.freedom for part, side in zip(parts, (one, other), strict=True))
    return UncertainValue(one.estimate - other.estimate, math.sqrt(total), freedom)


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
    return mean * exponential(-width), mean * exponential(width)


def exponential(value: float) -> float:
    """Returns e to the power of ``value``, infinity if it is too large for a float."""
    return math.exp(value) if value < 700.0 else math.inf
