"""Predictors of a request's acceptance from cheap statistics of two models, fitted on the user's data.

A request is a text with both models' distributions at its tokens. Every statistic is averaged over the request.
Acceptance is regressed on it over requests. Its error is that of predicting a request that was not in the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.plan.formulas import bounds
from foretoken.plan.formulas.acceptance import normalized, token, total_variation
from foretoken.plan.formulas.theory import text_survival

Reals = NDArray[np.float64]

BINS = 10  # of confidence, for the calibration error
MAX_DIVERGENCE = 25.0  # nats; larger and infinite divergences count as this
CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class TextDistributions:
    """Distributions of both models at the tokens of one request.

    Row i is the distribution of token i under the request's sampling parameters. Concatenate several chunks of one
    request.
    """

    p: Tensor  # the target's, [n, V]
    q: Tensor  # the draft's, [n, V]
    tokens: Sequence[int] = field(repr=False)  # the n tokens of the text

    def __post_init__(self) -> None:
        if self.p.ndim != 2 or self.p.shape != self.q.shape or len(self.tokens) != len(self.p) or not self.tokens:
            raise InvalidRequest(
                f"rows must be [n, V] for n > 0 tokens, the same for both models; got {tuple(self.p.shape)}, "
                f"{tuple(self.q.shape)} and {len(self.tokens)} tokens"
            )


@dataclass(frozen=True, slots=True)
class Predictor:
    """Linear fit of the requests' acceptance to a statistic.

    The predictor "constant" predicts the mean. A statistic with no smaller error is of no use.
    """

    name: str  # of the statistic
    correlation: float  # Pearson's, between statistic and acceptance
    error: float  # root mean square error of predicting each request from a fit to the others
    slope: float  # of the line
    intercept: float

    def predict(self, statistic: float) -> float:
        """Returns the predicted acceptance, from 0 to 1."""
        return min(1.0, max(0.0, self.intercept + self.slope * statistic))


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p||q), clamped so that one infinite position does not determine the mean of a request."""
    return bounds.divergence(p, q).clamp(max=MAX_DIVERGENCE)


def entropy_overlap(p: Tensor, q: Tensor) -> Tensor:
    """sum min(-p log p, -q log q) / sum max(...): 1 for equal distributions. The overlap where neither has entropy."""
    one, other = torch.special.entr(p), torch.special.entr(q)
    whole = torch.maximum(one, other).sum(-1)
    return torch.where(whole > 0, torch.minimum(one, other).sum(-1) / whole, token(p, q))


def margin(p: Tensor, q: Tensor) -> Tensor:
    """Probability of the draft's likeliest token minus that of its second."""
    best = q.topk(min(2, q.shape[-1]), dim=-1).values
    return best[:, 0] - (best[:, 1] if q.shape[-1] > 1 else 0.0)


STATISTICS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "KL divergence": divergence,
    "total variation": total_variation,
    "target entropy": lambda p, q: bounds.entropy(p),
    "draft entropy": lambda p, q: bounds.entropy(q),
    "Bhattacharyya overlap": bounds.bhattacharyya,
    "entropy overlap": entropy_overlap,
    "draft margin": margin,
}
"""Functions by name, from p and q, both [n, V], to one value per position, [n]."""


def calibration_error(q: Tensor, tokens: Sequence[int]) -> float:
    """Returns the expected calibration error of the draft's argmax over one request: |accuracy - confidence| by bin."""
    confidence, predicted = q.max(-1)
    right = (predicted == torch.as_tensor(tokens, device=q.device)).double()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=q.dtype, device=q.device).index_add(0, bins, right - confidence)
    return float(gaps.abs().sum()) / len(tokens)


def statistics(rows: TextDistributions) -> dict[str, float]:
    """Returns every statistic of one request by name, averaged over its positions."""
    p, q = normalized(rows.p), normalized(rows.q)
    means = {name: float(statistic(p, q).mean()) for name, statistic in STATISTICS.items()}
    return means | {"calibration error": calibration_error(q, rows.tokens)}


def text_acceptance(rows: TextDistributions) -> float:
    """Returns the mean of min(1, q/p) at the text's tokens.

    It is the probability, given the text, that one sampled draft token is accepted. Its mean over texts is 1 - TV.
    """
    tokens = torch.as_tensor(rows.tokens, device=rows.p.device).unsqueeze(-1)
    p, q = (normalized(side).gather(-1, tokens).squeeze(-1) for side in (rows.p, rows.q))
    return float(text_survival(p, q, 1).mean())


def predictors(requests: Sequence[TextDistributions], acceptance: Sequence[float] | None = None) -> list[Predictor]:
    """Returns a predictor for each statistic and the constant, the most accurate first.

    Args:
        requests: At least three.
        acceptance: Acceptance of each request, in the setting to be predicted (another proposer, temperature 0, ...).
            None is ``text_acceptance``.

    Raises:
        InvalidRequest: There are fewer than three requests, or not one acceptance for each.
    """
    if len(requests) < 3:
        raise InvalidRequest(f"at least three requests are needed to estimate errors, got {len(requests)}")
    if acceptance is not None and len(acceptance) != len(requests):
        raise InvalidRequest(f"one acceptance for each request is needed, got {len(acceptance)} for {len(requests)}")
    acceptance = acceptance or [text_acceptance(rows) for rows in requests]
    return fitted([statistics(rows) for rows in requests], acceptance)


def fitted(requests: Sequence[Mapping[str, float]], acceptance: Sequence[float]) -> list[Predictor]:
    """As ``predictors``, from the ``statistics`` of each request."""
    y = np.asarray(acceptance, dtype=np.float64)
    columns = {name: np.asarray([request[name] for request in requests]) for name in requests[0]}
    fits = [_fit(CONSTANT, np.zeros_like(y), y), *(_fit(name, x, y) for name, x in columns.items())]
    return sorted(fits, key=lambda predictor: predictor.error)


def _fit(name: str, x: Reals, y: Reals) -> Predictor:
    """Least squares. The leave-one-out error is each residual over 1 - its leverage."""
    away, count = x - x.mean(), len(x)
    spread = float(away @ away)
    if spread <= 1e-12 * max(1.0, float(x @ x)):
        slope, leverage, away = 0.0, np.full(count, 1.0 / count), np.zeros(count)
    else:
        slope, leverage = float(away @ y) / spread, 1.0 / count + np.square(away) / spread
    left_out = (y - y.mean() - slope * away) / np.maximum(1.0 - leverage, 1e-12)
    scale = float(np.sqrt(spread * np.square(y - y.mean()).sum()))
    correlation = float(away @ y) / scale if scale > 0.0 else 0.0
    error, intercept = float(np.sqrt(np.square(left_out).mean())), float(y.mean() - slope * x.mean())
    return Predictor(name, correlation, error, slope, intercept)
