"""Stop where all drafted tokens and the next one will hardly stand, as learned from what was verified.

P(accepted at depth k) = sigmoid(w_k m + b_k), m the log of q's largest probability over its second. Two numbers a depth
are learned within tens of rounds, follow the text as it changes, and need no training beforehand.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foretoken.control.stops import Gate, Rule, Stop
from foretoken.core.checks import integer, number
from foretoken.core.context import Context
from foretoken.core.step import StepOutput
from foretoken.models.base import Model

_LARGEST = 16.0  # a margin that says all there is to say; filters make infinite ones
_KEPT = 2048  # newest outcomes that a fit is made of
_DEPTHS = 16  # depths with numbers of their own; deeper places share the last one's
_EVERY = 16  # drafts between fits at first; later an eighth of all drafts so far, at most _SELDOM
_SELDOM = 64
_ITERATIONS = 30  # at most; from the last fit two or three do
# Gaussian priors as (centre, precision): a margin says little at first, and a depth is about like the others.
_START = np.array([0.5, 0.0])
_WEAK = np.array([1.0, 1.0])
_LIKE_THE_OTHERS = np.array([50.0, 8.0])  # about what fifty outcomes say

Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MarginConfig:
    """The draft ends where the chance that all its tokens and the next one stand is under ``threshold``.

    warmup: drafts that run to their end before the first one is cut, or only easy places would ever be seen.
    probe: later one draft in so many runs to its end, so that the estimate can recover.
    """

    threshold: float = 0.1
    warmup: int = 64
    probe: int = 32

    def __post_init__(self) -> None:
        number("threshold of the margin stop", self.threshold, 0.0, 1.0)
        integer("warmup of the margin stop", self.warmup, 0)
        integer("probe of the margin stop", self.probe, 2)


def margin(row: Tensor) -> float:
    """log of the largest probability of ``row`` [V] over the second, at most 16; 16 where there is no second."""
    if row.shape[-1] < 2:
        return _LARGEST
    first, second = row.topk(2).values.tolist()
    return min(_LARGEST, math.log(first / second)) if second > first * math.exp(-_LARGEST) else _LARGEST


@dataclass(slots=True)
class MarginEstimate:
    """The acceptance of one kind of request by depth (from 0) and margin.

    outcomes: (depth, margin, accepted), only of places that were reached: what is below a rejection is not known.
    pooled: (w, b) over all depths, which a depth falls back on. fits: (w, b) by depth.
    """

    outcomes: deque[tuple[int, float, bool]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    pooled: Reals = field(default_factory=_START.copy)
    fits: list[Reals] = field(default_factory=list)
    begun: int = 0
    observed: int = 0
    fitted: int = 0

    def chance(self, depth: int, margin: float) -> float:
        """P(the token drawn at ``depth`` is accepted | those above it are)."""
        depth = min(depth, _DEPTHS - 1)
        w, b = self.fits[depth] if depth < len(self.fits) else self.pooled
        return 1.0 / (1.0 + math.exp(-min(500.0, max(-500.0, float(w) * margin + float(b)))))

    def learn(self, margins: list[float], accepted: int) -> None:
        """A draft of ``len(margins)`` tokens of which ``accepted`` were; refits when enough are new."""
        for depth, value in enumerate(margins[: accepted + 1]):
            self.outcomes.append((min(depth, _DEPTHS - 1), value, depth < accepted))
        self.observed += 1
        if self.observed - self.fitted >= min(_SELDOM, max(_EVERY, self.observed // 8)):
            self.refit()

    def refit(self) -> None:
        """Newton steps from the last fit: the pooled one first, then each depth's around it."""
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
    """The (w, b) that maximise sum log P(y | sigmoid(w x + b)) under a Gaussian prior. x, y: [N], y from 0 to 1.

    Newton's method, halving a step that goes too far: the objective is concave, so it always arrives.
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
        while (found := objective(theta + step)) < best and np.abs(step).max() > 1e-9:
            step = step / 2
        if found <= best:
            break
        gain, theta, best = found - best, theta + step, found
        if gain < 1e-6 * (1.0 + abs(best)):
            break
    return theta


@dataclass(slots=True)
class _MarginDraft:
    """One draft. full: it runs to its end, whatever the estimate says."""

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
    """Learns from all sequences. Requests that are verified by other rules are of other kinds and learn apart.

    Where a draft ends depends on what was verified in any request before, never on what is drawn now: the law of each
    request stays the target's.
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
    """Whatever the model."""
    return MarginStop(config)


RULE = Rule(MarginConfig, build)
