"""Predictors of a request's acceptance from cheap statistics of two models, fitted on the user's data.

A request is a text with both models' distributions at its tokens. Every statistic is averaged over the request.
Acceptance is regressed on it over requests. Its error is that of predicting a request that was not in the fit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.errors import InvalidRequest

Reals = NDArray[np.float64]

BINS = 10  # of confidence, for the calibration error
MAX_DIVERGENCE = 25.0  # nats; larger and infinite divergences count as this
CONSTANT = "constant"
_TOLERANCE = 1e-2  # largest deviation from 1 of the sum of a row in half precision


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


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """sum min(p, q): the acceptance of one sampled token by token rejection (2211.17192, theorem 3.5)."""
    return torch.minimum(p, q).sum(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p||q), clamped so that one infinite position does not determine the mean of a request."""
    nats = torch.where(p > 0, p * (p.log() - q.log()), 0.0).sum(-1)
    return nats.clamp(0.0, MAX_DIVERGENCE)


def entropy(p: Tensor) -> Tensor:
    """H(p) = -sum p log p, in nats."""
    return torch.special.entr(p).sum(-1)


def entropy_overlap(p: Tensor, q: Tensor) -> Tensor:
    """sum min(-p log p, -q log q) / sum max(...): 1 for equal distributions. The overlap where neither has entropy."""
    one, other = torch.special.entr(p), torch.special.entr(q)
    whole = torch.maximum(one, other).sum(-1)
    return torch.where(whole > 0, torch.minimum(one, other).sum(-1) / whole, overlap(p, q))


def margin(p: Tensor, q: Tensor) -> Tensor:
    """Probability of the draft's likeliest token minus that of its second."""
    best = q.topk(min(2, q.shape[-1]), dim=-1).values
    return best[:, 0] - (best[:, 1] if q.shape[-1] > 1 else 0.0)


STATISTICS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "KL divergence": divergence,
    "total variation": lambda p, q: 1.0 - overlap(p, q),
    "target entropy": lambda p, q: entropy(p),
    "draft entropy": lambda p, q: entropy(q),
    "Bhattacharyya overlap": lambda p, q: (p * q).sqrt().sum(-1),
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


def statistics(p: Tensor, q: Tensor, tokens: Sequence[int]) -> dict[str, float]:
    """Returns every statistic of one request by name, averaged over its positions.

    Args:
        p: The target's distribution of each token under the request's sampling parameters, [n, V].
        q: The draft's, likewise.
        tokens: The n tokens of the text.

    Raises:
        InvalidRequest: The shapes differ, or rows are no distributions.
    """
    if p.ndim != 2 or p.shape != q.shape or len(tokens) != len(p) or not tokens:
        raise InvalidRequest(
            f"rows must be [n, V] for n > 0 tokens, the same for both models; got {tuple(p.shape)}, {tuple(q.shape)} "
            f"and {len(tokens)} tokens"
        )
    p, q = _normalized(p), _normalized(q)
    means = {name: float(statistic(p, q).mean()) for name, statistic in STATISTICS.items()}
    return means | {"calibration error": calibration_error(q, tokens)}


def fitted(requests: Sequence[Mapping[str, float]], acceptance: Sequence[float]) -> list[Predictor]:
    """Returns a predictor for each statistic and the constant, the most accurate first.

    Args:
        requests: ``statistics`` of three requests or more.
        acceptance: Acceptance of each, in the setting to be predicted.

    Raises:
        InvalidRequest: There are fewer than three requests, or not one acceptance for each.
    """
    if len(requests) < 3:
        raise InvalidRequest(f"at least three requests are needed to estimate errors, got {len(requests)}")
    if len(acceptance) != len(requests):
        raise InvalidRequest(f"one acceptance for each request is needed, got {len(acceptance)} for {len(requests)}")
    y = np.asarray(acceptance, dtype=np.float64)
    columns = {name: np.asarray([request[name] for request in requests]) for name in requests[0]}
    fits = [_fit(CONSTANT, np.zeros_like(y), y), *(_fit(name, x, y) for name, x in columns.items())]
    return sorted(fits, key=lambda predictor: predictor.error)


def _normalized(rows: Tensor) -> Tensor:
    """Returns ``rows`` [n, V] in float64, each divided by its sum. Raises InvalidRequest unless rows sum to 1."""
    probs = rows.double()
    sums = probs.sum(-1, keepdim=True)
    if not bool(((probs >= 0).all(-1, keepdim=True) & ((sums - 1).abs() < _TOLERANCE)).all()):
        raise InvalidRequest(
            "rows must be probabilities, none negative and each row summing to 1: softmax logits first"
        )
    return probs / sums


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
