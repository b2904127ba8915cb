"""Statistics that predict acceptance: their values, and fits whose error is that of unseen requests."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from foretoken.core.errors import InvalidRequest
from foretoken.plan.chains import text_probabilities
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
