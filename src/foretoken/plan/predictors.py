"""Which cheap statistics of two models foretell what a request accepts: fitted on the user's data, each with its error.

A request is a text with both models' laws at its tokens. Every statistic is averaged over the request, acceptance is
regressed on it over requests, and its error is that of foretelling a request that the fit has not seen.
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
from foretoken.plan.formulas.acceptance import law, token, total_variation

Reals = NDArray[np.float64]

BINS = 10  # of confidence, for the calibration error
SURPRISE = 25.0  # nats; a divergence that is larger, or infinite, counts as this
CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class TextDistributions:
    """One request's text as both models see it: the target's laws p [n, V], the draft's q [n, V], its n tokens.

    Row i is the law that token i was drawn from, under the request's sampling parameters. Several chunks of one request
    are one request: concatenate them.
    """

    p: Tensor
    q: Tensor
    tokens: Sequence[int] = field(repr=False)

    def __post_init__(self) -> None:
        if self.p.ndim != 2 or self.p.shape != self.q.shape or len(self.tokens) != len(self.p) or not self.tokens:
            raise InvalidRequest(
                f"rows must be [n, V] for n > 0 tokens, the same for both models; got {tuple(self.p.shape)}, "
                f"{tuple(self.q.shape)} and {len(self.tokens)} tokens"
            )


@dataclass(frozen=True, slots=True)
class Predictor:
    """A statistic's line through the requests' acceptance, and how well it holds.

    correlation: Pearson's, between statistic and acceptance. error: root mean square of acceptance foretold for each
    request from a fit to the others. The predictor named "constant" foretells their mean: what is no better is no use.
    """

    name: str
    correlation: float
    error: float
    slope: float
    intercept: float

    def predict(self, statistic: float) -> float:
        """Acceptance foretold, from 0 to 1."""
        return min(1.0, max(0.0, self.intercept + self.slope * statistic))


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p||q), of which one endless position must not be all that is seen of a request."""
    return bounds.divergence(p, q).clamp(max=SURPRISE)


def entropy_overlap(p: Tensor, q: Tensor) -> Tensor:
    """sum min(-p log p, -q log q) over sum max: 1 for equal laws; plain overlap where neither has entropy."""
    one, other = torch.special.entr(p), torch.special.entr(q)
    whole = torch.maximum(one, other).sum(-1)
    return torch.where(whole > 0, torch.minimum(one, other).sum(-1) / whole, token(p, q))


def margin(p: Tensor, q: Tensor) -> Tensor:
    """The draft's likeliest token over its second."""
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
"""By name: (p, q), both [n, V], to a number for each position, [n]."""


def calibration_error(q: Tensor, tokens: Sequence[int]) -> float:
    """Expected calibration error of the draft's argmax as a guess at the text: |share right - confidence| by bin.

    A number of the request, not of a position.
    """
    confidence, guess = q.max(-1)
    right = (guess == torch.as_tensor(tokens, device=q.device)).double()
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=q.dtype, device=q.device).index_add(0, place, right - confidence)
    return float(gaps.abs().sum()) / len(tokens)


def statistics(rows: TextDistributions) -> dict[str, float]:
    """Every statistic of one request, means over its positions."""
    p, q = law(rows.p), law(rows.q)
    found = {name: float(statistic(p, q).mean()) for name, statistic in STATISTICS.items()}
    return found | {"calibration error": calibration_error(q, rows.tokens)}


def text_acceptance(rows: TextDistributions) -> float:
    """What drawn drafts have accepted of this text: the mean of min(1, q/p) at its tokens.

    The chance, given the text, that a draft drawn at a position is accepted; over texts its mean is 1 - TV.
    """
    tokens = torch.as_tensor(rows.tokens, device=rows.p.device).unsqueeze(-1)
    p, q = (law(side).gather(-1, tokens).squeeze(-1) for side in (rows.p, rows.q))
    return float(torch.where(p > 0, q / p, 0.0).clamp(max=1.0).mean())


def predictors(requests: Sequence[TextDistributions], acceptance: Sequence[float] | None = None) -> list[Predictor]:
    """One for each statistic and the constant, the most accurate first.

    acceptance: what each request accepted, as measured in whatever way is to be foretold (another proposer's, at
    temperature 0, ...); without it, ``text_acceptance``. Raises InvalidRequest for less than three requests.
    """
    if len(requests) < 3:
        raise InvalidRequest(f"three requests are the least that errors can be told from, got {len(requests)}")
    if acceptance is not None and len(acceptance) != len(requests):
        raise InvalidRequest(f"one acceptance for each request is needed, got {len(acceptance)} for {len(requests)}")
    return fitted(
        [statistics(rows) for rows in requests], acceptance or [text_acceptance(rows) for rows in requests]
    )  # fmt: skip


def fitted(requests: Sequence[Mapping[str, float]], acceptance: Sequence[float]) -> list[Predictor]:
    """As ``predictors``, from statistics already taken: one mapping of names to numbers for each request."""
    y = np.asarray(acceptance, dtype=np.float64)
    columns = {name: np.asarray([request[name] for request in requests]) for name in requests[0]}
    found = [_fit(CONSTANT, np.zeros_like(y), y), *(_fit(name, x, y) for name, x in columns.items())]
    return sorted(found, key=lambda predictor: predictor.error)


def _fit(name: str, x: Reals, y: Reals) -> Predictor:
    """Least squares, and the error of leaving out one request at a time: each residual over 1 - its leverage."""
    away, count = x - x.mean(), len(x)
    spread = float(away @ away)
    if spread <= 1e-12 * max(1.0, float(x @ x)):
        slope, leverage, away = 0.0, np.full(count, 1.0 / count), np.zeros(count)
    else:
        slope, leverage = float(away @ y) / spread, 1.0 / count + np.square(away) / spread
    left_out = (y - y.mean() - slope * away) / np.maximum(1.0 - leverage, 1e-12)
    scale = float(np.sqrt(spread * np.square(y - y.mean()).sum()))
    correlation = float(away @ y) / scale if scale > 0.0 else 0.0
    return Predictor(
        name, correlation, float(np.sqrt(np.square(left_out).mean())), slope, float(y.mean() - slope * x.mean())
    )  # fmt: skip
