"""Intervals by request, and statistics that predict acceptance, against scipy, omission by hand and the truth."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats

from foretoken.core.errors import InvalidRequest
from foretoken.plan.predictors import (
    CONSTANT,
    MAX_DIVERGENCE,
    STATISTICS,
    Predictor,
    calibration_error,
    divergence,
    entropy_overlap,
    fitted,
    margin,
    overlap,
    statistics,
)
from foretoken.plan.replay import text_probabilities
from foretoken.plan.statistics import Interval, ratio_interval, student_quantile
from foretoken.plan.texts import SampledText


class TextDistributions(NamedTuple):
    """Distributions of both models, [n, V], at the tokens of a text."""

    p: torch.Tensor
    q: torch.Tensor
    tokens: list[int]


def request(seed: int, noise: float, length: int = 150, vocab: int = 12) -> TextDistributions:
    """A text sampled from p, with a draft that is off by ``noise``."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(length, vocab, generator=generator, dtype=torch.float64)
    p = logits.softmax(-1)
    q = (logits + noise * torch.randn(length, vocab, generator=generator, dtype=torch.float64)).softmax(-1)
    return TextDistributions(p, q, torch.multinomial(p, 1, generator=generator).squeeze(1).tolist())


REQUESTS = [request(seed, 0.2 + 0.15 * seed) for seed in range(16)]


def text_acceptance(rows: TextDistributions) -> float:
    text = SampledText((0,), tuple(rows.tokens), len(rows.tokens))
    return text_probabilities(text, rows.p, rows.q, fixed=False).acceptance


def predictors(acceptance: list[float]) -> list[Predictor]:
    return fitted([statistics(*rows) for rows in REQUESTS], acceptance)


def test_statistics_are_means_over_positions():
    rows = REQUESTS[3]
    result = statistics(*rows)
    assert set(result) == {*STATISTICS, "calibration error"}
    assert result["total variation"] == pytest.approx(float((rows.p - rows.q).abs().sum(-1).mean() / 2))
    assert result["KL divergence"] == pytest.approx(float((rows.p * (rows.p / rows.q).log()).sum(-1).mean()))
    assert result["target entropy"] == pytest.approx(float(-(rows.p * rows.p.log()).sum(-1).mean()))
    assert result["Bhattacharyya overlap"] == pytest.approx(float((rows.p * rows.q).sqrt().sum(-1).mean()))


def test_acceptance_of_the_text_is_the_overlap_in_the_mean():
    result = np.mean([text_acceptance(rows) for rows in REQUESTS])
    truth = np.mean([float(overlap(rows.p, rows.q).mean()) for rows in REQUESTS])
    assert result == pytest.approx(truth, abs=0.02)


def test_entropy_overlap_and_margin():
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    assert entropy_overlap(p, q).tolist() == [1.0, 1.0, 0.0]
    assert margin(p, torch.tensor([[0.2, 0.7, 0.1]])).tolist() == pytest.approx([0.5])
    assert margin(p[:, :1], torch.ones(1, 1)).tolist() == [1.0]


def test_calibration_error():
    q = torch.tensor([[0.75, 0.25]] * 4, dtype=torch.float64)
    assert calibration_error(q, [0, 0, 0, 1]) == pytest.approx(0.0, abs=1e-12)
    assert calibration_error(q, [0, 0, 0, 0]) == pytest.approx(0.25)
    assert calibration_error(torch.tensor([[1.0, 0.0]], dtype=torch.float64), [1]) == pytest.approx(1.0)


def test_a_divergence_without_end_is_cut():
    rows = TextDistributions(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), [0])
    assert statistics(*rows)["KL divergence"] == MAX_DIVERGENCE
    assert text_acceptance(rows) == 0.0


def test_the_overlap_predicts_best_and_all_that_measure_distance_beat_the_constant():
    result = predictors([text_acceptance(rows) for rows in REQUESTS])
    errors = {predictor.name: predictor.error for predictor in result}
    assert list(errors.values()) == sorted(errors.values())
    assert set(errors) == {*STATISTICS, "calibration error", CONSTANT}
    assert errors["total variation"] < 0.03
    for name in ("KL divergence", "Bhattacharyya overlap", "entropy overlap", "total variation"):
        assert errors[name] < 0.5 * errors[CONSTANT], name
    by_name = {predictor.name: predictor for predictor in result}
    assert by_name["total variation"].correlation < -0.98
    assert by_name["total variation"].slope == pytest.approx(-1.0, abs=0.15)
    assert by_name["entropy overlap"].correlation > 0.9


def test_acceptance_may_be_measured_in_another_way():
    measured = [0.9 - 0.02 * i for i in range(16)]
    result = {predictor.name: predictor for predictor in predictors(measured)}
    assert result["total variation"].predict(statistics(*REQUESTS[0])["total variation"]) == pytest.approx(
        0.9, abs=0.05
    )


def test_errors_are_those_of_requests_left_out():
    rng = np.random.default_rng(0)
    x, y = rng.random(9), rng.random(9)
    line, *_ = (p for p in fitted([{"x": value} for value in x], list(y)) if p.name == "x")
    missed = []
    for i in range(9):
        others = np.arange(9) != i
        slope, intercept = np.polyfit(x[others], y[others], 1)
        missed.append(intercept + slope * x[i] - y[i])
    assert line.error == pytest.approx(float(np.sqrt(np.mean(np.square(missed)))))
    assert (line.slope, line.intercept) == pytest.approx(tuple(np.polyfit(x, y, 1)))
    assert line.correlation == pytest.approx(np.corrcoef(x, y)[0, 1])


def test_a_statistic_that_never_changes_is_the_constant():
    result = fitted([{"x": 0.1}] * 4, [0.1, 0.3, 0.5, 0.7])
    assert {(p.correlation, p.slope) for p in result} == {(0.0, 0.0)}
    assert result[0].error == pytest.approx(result[1].error)
    assert result[0].predict(5.0) == pytest.approx(0.4)


def test_predictions_are_chances():
    line = fitted([{"x": 0.0}, {"x": 0.5}, {"x": 1.0}], [0.0, 0.5, 1.0])[0]
    assert line.predict(-3.0) == 0.0
    assert line.predict(3.0) == 1.0
    assert math.isfinite(line.error)


def test_divergences_of_a_known_pair():
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
    assert float(divergence(p, q)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: fitted([{"x": 0.1}] * 2, [0.1] * 2), "three requests"),
        (lambda: fitted([{"x": 0.1}] * 4, [0.1]), "one acceptance"),
        (lambda: statistics(torch.ones(2, 3), torch.ones(2, 4), [0, 1]), r"\[n, V\]"),
        (lambda: statistics(torch.ones(2, 3), torch.ones(2, 3), [0]), "1 tokens"),
        (lambda: statistics(REQUESTS[0].p.log(), REQUESTS[0].q, REQUESTS[0].tokens), "softmax"),
        (lambda: statistics(REQUESTS[0].p * 2, REQUESTS[0].q, REQUESTS[0].tokens), "summing to 1"),
    ],
)
def test_invalid_requests_raise(wrong, message):
    with pytest.raises(InvalidRequest, match=message):
        wrong()


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
def test_impossible_statistics_are_refused(wrong, message):
    with pytest.raises(InvalidRequest, match=message):
        wrong()
