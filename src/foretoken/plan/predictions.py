"""Rows of a plan, from acceptance and step times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.plan.candidates import Candidate
from foretoken.plan.rows import PlanRow
from foretoken.plan.statistics import around, ratio_interval
from foretoken.plan.step_times import MeasuredStepTimes, StepTime
from foretoken.plan.step_timing import PrefillTiming
from foretoken.plan.tally import AcceptanceEstimate

_TIMED = (1, 2, 4, 6, 8)  # draft lengths that are timed where there are many; others are interpolated
_NORMAL = 1.96  # standard errors in half an interval


def timed_depths(depths: Sequence[int]) -> list[int]:
    """Returns the draft lengths that are timed: all of a few, some of many, always the deepest."""
    return list(depths) if len(depths) <= len(_TIMED) else [d for d in depths if d in _TIMED or d == max(depths)]


def lane_name(candidate: Candidate, depth: int) -> str:
    """Returns the name under which a candidate's draft length is timed."""
    return f"{candidate.name} @ {depth}"


def _time(candidate: Candidate, depth: int, times: MeasuredStepTimes, estimate: AcceptanceEstimate) -> StepTime:
    """Returns the time of a step, interpolated where the draft length was not timed."""
    near = timed_depths(candidate.depths)
    low, high = max(d for d in near if d <= depth), min(d for d in near if d >= depth)
    start, end = (times.of(lane_name(candidate, d), estimate.sizes) for d in (low, high))
    share = (depth - low) / (high - low) if low < high else 0.0
    return StepTime(*((1 - share) * a + share * b for a, b in zip(start, end, strict=True)))


@dataclass(frozen=True, slots=True)
class Place:
    """Measurements at one temperature and batch, shared by all candidates."""

    temperature: float
    batch: int
    tokens: float  # mean of a completion
    times: MeasuredStepTimes
    prefill: PrefillTiming


def predicted_row(candidate: Candidate, depth: int, place: Place, estimate: AcceptanceEstimate) -> PlanRow:
    """Returns the prediction for one candidate and draft length."""
    time = _time(candidate, depth, place.times, estimate)
    mean, width = estimate.tokens_per_pass, spread(estimate)
    speedup, off = mean / time.over_plain, math.hypot(width, math.sqrt(2) * _NORMAL * time.error)
    (fewest, most), (low, high) = around(mean, width), around(speedup, off)
    plain = place.prefill.seconds + (place.tokens - 1) * place.times.plain
    own_prefill = place.prefill.seconds * place.prefill.over_plain[candidate.name]
    steps = sum(estimate.steps) / max(1, len(estimate.tallies))
    return PlanRow(
        name=candidate.name,
        method=candidate.method,
        config=candidate.at(depth),
        temperature=place.temperature,
        batch=place.batch,
        tokens_per_pass=mean,
        tokens_per_pass_low=fewest,
        tokens_per_pass_high=most,
        speedup=speedup,
        low=low,
        high=high,
        end_to_end=plain / (own_prefill + steps * time.seconds),
        step_seconds=time.seconds,
        draft_seconds=time.propose,
        plain_seconds=place.times.plain,
        acceptance=estimate.acceptance,
        estimator=estimate.estimator,
        requests=estimate.requests,
    )


def spread(estimate: AcceptanceEstimate) -> float:
    """Returns half the width of the interval of log(tokens per pass) for another sample of as many requests.

    Infinite for one request. The other sample has one text per request, whose variance is that of the mean over all
    draws times their number.
    """
    if estimate.requests < 2:
        return math.inf
    return math.sqrt(1 + estimate.draws) * ratio_interval(estimate.tokens, estimate.steps).width
