"""Ends a draft where the next token is unlikely to be accepted, as learned from earlier verdicts.

P(accepted at depth k) = sigmoid(w_k m + b_k), where the margin m is the log of q's largest probability over its second.
The two numbers of a depth are learned within tens of steps, follow the text, and need no training beforehand.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.checks import integer, number
from foretoken.core.context import Context
from foretoken.core.step import StepOutput
from foretoken.models.base import Model
from foretoken.propose.stopping.base import Gate, Stop, StopRule

_MAX_MARGIN = 16.0  # filters make infinite margins; beyond this they carry no information
_KEPT = 2048  # a fit uses the newest outcomes
_DEPTHS = 16  # depths with a fit of their own; deeper positions share the last one's
_MIN_INTERVAL = 16  # drafts between fits at first; later an eighth of all drafts so far, at most _MAX_INTERVAL
_MAX_INTERVAL = 64
_ITERATIONS = 30  # maximum; from the previous fit two or three suffice
# Gaussian priors as (centre, precision): weak over all depths, and each depth is expected to be like the others.
_START = np.array([0.5, 0.0])
_WEAK = np.array([1.0, 1.0])
_LIKE_THE_OTHERS = np.array([50.0, 8.0])  # about the weight of fifty outcomes

Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MarginConfig:
    """The draft ends where the probability that all its tokens and the next are accepted is below ``threshold``.

    Attributes:
        threshold: Between 0 and 1.
        warmup: Drafts that use their whole budget before the first one is cut. Otherwise only easy positions would be
            observed.
        probe: Later one draft in ``probe`` uses its whole budget, so that the estimate can recover.
    """

    threshold: float = 0.1
    warmup: int = 64
    probe: int = 32

    def __post_init__(self) -> None:
        number("threshold of the margin stop", self.threshold, 0.0, 1.0)
        integer("warmup of the margin stop", self.warmup, 0)
        integer("probe of the margin stop", self.probe, 2)


def margin(row: Tensor) -> float:
    """Returns log(largest / second probability) of ``row`` [V], at most 16; 16 where there is no second."""
    if row.shape[-1] < 2:
        return _MAX_MARGIN
    first, second = row.topk(2).values.tolist()
    return min(_MAX_MARGIN, math.log(first / second)) if second > first * math.exp(-_MAX_MARGIN) else _MAX_MARGIN


@dataclass(slots=True)
class MarginEstimate:
    """Acceptance rate of one kind of request by depth (from 0) and margin.

    Attributes:
        outcomes: (depth, margin, accepted) of positions that were reached. Below a rejection nothing is known.
        pooled: (w, b) over all depths, the prior of each depth.
        fits: (w, b) by depth.
        begun: Drafts that began.
        observed: Drafts whose outcome is known.
        fitted: ``observed`` at the last fit.
    """

    outcomes: deque[tuple[int, float, bool]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    pooled: Reals = field(default_factory=_START.copy)
    fits: list[Reals] = field(default_factory=list)
    begun: int = 0
    observed: int = 0
    fitted: int = 0

    def chance(self, depth: int, margin: float) -> float:
        """Returns P(the token drawn at ``depth`` is accepted | its ancestors are)."""
        depth = min(depth, _DEPTHS - 1)
        w, b = self.fits[depth] if depth < len(self.fits) else self.pooled
        return 1.0 / (1.0 + math.exp(-min(500.0, max(-500.0, float(w) * margin + float(b)))))

    def learn(self, margins: list[float], accepted: int) -> None:
        """Records a draft of ``len(margins)`` tokens, ``accepted`` of which were accepted. Refits at intervals."""
        for depth, value in enumerate(margins[: accepted + 1]):
            self.outcomes.append((min(depth, _DEPTHS - 1), value, depth < accepted))
        self.observed += 1
        if self.observed - self.fitted >= min(_MAX_INTERVAL, max(_MIN_INTERVAL, self.observed // 8)):
            self.refit()

    def refit(self) -> None:
        """Runs Newton steps from the last fit: over all depths first, then for each depth with that as its prior."""
        self.fitted = self.observed
        if not self.outcomes:
            return
        depth, margins, accepted = np.array(self.outcomes, dtype=np.float64).T
        self.pooled = logistic(margins, accepted, self.pooled, _START, _WEAK)
        old, self.fits = self.fits, []
        for k in range(int(depth.max()) + 1):
            at = depth == k
            start = old[k] if k < len(old) else self.pooled
            self.fits.append(logistic(margins[at], accepted[at], start, self.pooled, _LIKE_THE_OTHERS))


def logistic(x: Reals, y: Reals, start: Reals, centre: Reals, precision: Reals) -> Reals:
    """Returns the (w, b) that maximize sum log P(y | sigmoid(w x + b)) under a Gaussian prior.

    Newton's method with step halving; the objective is concave, so it converges.

    Args:
        x: [N].
        y: [N], between 0 and 1.
        start: First (w, b).
        centre: Mean of the prior.
        precision: Precision of the prior.
    """

    def objective(theta: Reals) -> float:
        z = theta[0] * x + theta[1]
        away = theta - centre
        return float((y * z - np.logaddexp(0.0, z)).sum() - 0.5 * (precision * away * away).sum())

    theta, best = start, objective(start)
    for _ in range(_ITERATIONS):
        p = 0.5 * (1.0 + np.tanh(0.5 * (theta[0] * x + theta[1])))
        weight = p * (1.0 - p)
        off, wx = y - p, weight * x
        gradient = np.array([(off * x).sum(), off.sum()]) - precision * (theta - centre)
        curvature = np.array([[(wx * x).sum(), wx.sum()], [wx.sum(), weight.sum()]]) + np.diag(precision)
        step = np.linalg.solve(curvature, gradient)
        while (value := objective(theta + step)) < best and np.abs(step).max() > 1e-9:
            step = step / 2
        if value <= best:
            break
        gain, theta, best = value - best, theta + step, value
        if gain < 1e-6 * (1.0 + abs(best)):
            break
    return theta


@dataclass(slots=True)
class _MarginDraft:
    """One draft. A ``full`` one uses its whole budget, whatever the estimate."""

    estimate: MarginEstimate
    threshold: float
    full: bool
    margins: list[float] = field(default_factory=list)
    survival: float = 1.0

    def stops(self, row: Tensor, hidden: Tensor | None) -> bool:
        value = margin(row)
        self.survival *= self.estimate.chance(len(self.margins), value)
        self.margins.append(value)
        return not self.full and self.survival < self.threshold


class MarginStop(Stop):
    """Learns from all sequences, separately for each kind of verification.

    The end of a draft depends on earlier verdicts of any request, never on the current draw, so the distribution of
    each request stays the target's.
    """

    def __init__(self, config: MarginConfig) -> None:
        self.config = config
        self.estimates: dict[str, MarginEstimate] = {}  # "greedy", or the grade
        self._drafts: dict[int, _MarginDraft] = {}

    def begin(self, context: Context) -> Gate:
        kind = "greedy" if context.law.greedy else context.exactness.value
        estimate = self.estimates.setdefault(kind, MarginEstimate())
        estimate.begun += 1
        full = estimate.observed < self.config.warmup or estimate.begun % self.config.probe == 0
        draft = self._drafts[context.id] = _MarginDraft(estimate, self.config.threshold, full)
        return draft

    def observe(self, context: Context, step: StepOutput) -> None:
        draft = self._drafts.pop(context.id, None)
        if draft is not None:
            draft.estimate.learn(draft.margins[: len(step.draft)], len(step.verdict.path))

    def forget(self, context: Context) -> None:
        self._drafts.pop(context.id, None)


def build(config: MarginConfig, model: Model) -> MarginStop:
    """Returns the rule; it does not depend on the model."""
    return MarginStop(config)


RULE = StopRule(MarginConfig, build)
