"""Intervals by request: against scipy, against omission by hand, and against the truth, a few thousand times."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from foretoken.core.errors import InvalidRequest
from foretoken.plan.statistics import Interval, ratio_interval, student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 10, 31, 63, 400])
@pytest.mark.parametrize("probability", [0.5, 0.6, 0.9, 0.975, 0.9995])
def test_quantiles_are_those_of_scipy(freedom, probability):
    assert student_quantile(probability, freedom) == pytest.approx(
        stats.t.ppf(probability, freedom), rel=1e-8, abs=1e-9
    )


@pytest.mark.parametrize("freedom", [1.2, 1.7, 2.5, 4.9, 20.3])
def test_fractions_of_a_degree_err_to_the_wider_side(freedom):
    exact, result = stats.t.ppf(0.975, freedom), student_quantile(0.975, freedom)
    assert exact <= result <= min(1.15 * exact, student_quantile(0.975, math.floor(freedom)))


def test_less_than_a_degree_is_one():
    assert student_quantile(0.975, 0.5) == student_quantile(0.975, 1)


def test_a_ratio_of_sums_and_its_jackknife():
    tokens, steps = [120.0, 80.0, 200.0, 60.0], [40.0, 35.0, 55.0, 22.0]
    result = ratio_interval(tokens, steps)
    assert result.estimate == pytest.approx(460 / 152)
    shifts = [(460 - y) / (152 - x) - result.estimate for y, x in zip(tokens, steps, strict=True)]
    error = math.sqrt(3 / 4 * sum(shift**2 for shift in shifts))
    quantile = (result.high - result.estimate) / error
    assert stats.t.ppf(0.975, 3) < quantile < stats.t.ppf(0.975, 2)  # four requests of unequal length
    assert result.estimate - result.low == pytest.approx(result.high - result.estimate)
    narrow = ratio_interval(tokens, steps, level=0.5)
    assert result.low < narrow.low < narrow.high < result.high


def test_equal_denominators_give_the_classical_interval_of_a_mean():
    values = [3.0, 4.5, 2.0, 5.0, 3.5]
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert ratio_interval(values, [1.0] * 5) == pytest.approx((np.mean(values), low, high))


def requests(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Requests of very unequal length, each with an acceptance length of its own; the true ratio is 2.5."""
    steps = np.ceil(rng.gamma(2.0, 20.0, count))
    own = 1.0 + 3.0 * rng.beta(2.0, 2.0, count)
    return own * steps, steps


@pytest.mark.parametrize("count", [2, 3, 5, 8, 16, 64])
def test_intervals_cover_what_they_promise(count):
    rng = np.random.default_rng(count)
    result = [ratio_interval(*requests(rng, count)) for _ in range(800)]
    assert 0.93 <= np.mean([low <= 2.5 <= high for _, low, high in result]) <= 0.985


def test_one_request_is_an_estimate_without_an_end():
    assert ratio_interval([30.0], [10.0]) == (3.0, -math.inf, math.inf)


def test_requests_without_rounds_tell_nothing():
    whole = ratio_interval([30.0, 20.0, 0.0], [10.0, 8.0, 0.0])
    assert whole == ratio_interval([30.0, 20.0], [10.0, 8.0])
    assert ratio_interval([30.0, 0.0], [10.0, 0.0]) == (3.0, -math.inf, math.inf)
    assert ratio_interval([30.0, 1.0], [10.0, 0.0]).high == math.inf


def test_requests_that_agree_leave_no_doubt():
    assert ratio_interval([3.0, 6.0], [1.0, 2.0]) == Interval(3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: ratio_interval([1.0], [1.0, 2.0]), "1 numerators"),
        (lambda: ratio_interval([1.0], [0.0]), "not all be 0"),
        (lambda: ratio_interval([], []), "not all be 0"),
        (lambda: ratio_interval([1.0, 2.0], [1.0, -1.0]), "not be negative"),
        (lambda: ratio_interval([math.nan], [1.0]), "finite"),
        (lambda: ratio_interval([1.0], [1.0], level=1.0), "level"),
        (lambda: student_quantile(0.2, 3), "probability"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(InvalidRequest, match=message):
        wrong()
