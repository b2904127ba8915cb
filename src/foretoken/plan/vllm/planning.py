"""A plan for vLLM, measured on vLLM itself: short runs at a few draft lengths, the others interpolated.

Tokens per pass at a draft length that was run are those measured. Between two such lengths they follow the longer one's
acceptance, cut at the length and scaled to agree with the shorter one. Step times are interpolated linearly. Every
candidate alternates with plain decoding in a second process, so that a machine that slows down slows both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.plan.outcome import Plan, choices, mark_best
from foretoken.plan.rows import PlanRow
from foretoken.plan.vllm.measured import PLAIN, VllmCandidate, VllmRun


@dataclass(frozen=True)
class VllmPrediction:
    """Prediction for one lane at one draft length. Widths are half the relative width of an interval."""

    tokens_per_pass: float
    step_seconds: float
    tokens_width: float
    seconds_width: float
    acceptance: tuple[float, ...]


def predict(runs: Sequence[VllmRun], depth: int) -> VllmPrediction:
    """Predicts from the same lane's ``runs`` at this or other draft lengths.

    Raises:
        InvalidRequest: ``depth`` is outside of those that were run.
    """
    by_depth = {run.depth: run for run in runs}
    if depth in by_depth:
        run = by_depth[depth]
        return VllmPrediction(
            run.tokens_per_pass, run.step_seconds, run.tokens_width, run.seconds_width, _acceptance(run, depth)
        )
    if not min(by_depth, default=0) < depth < max(by_depth, default=0):
        raise InvalidRequest(f"depth {depth} lies outside those that were run: {', '.join(map(str, sorted(by_depth)))}")
    low = by_depth[max(known for known in by_depth if known < depth)]
    high = by_depth[min(known for known in by_depth if known > depth)]
    share = (depth - low.depth) / (high.depth - low.depth)
    ends = low.tokens_per_pass / high.within(low.depth), high.tokens_per_pass / high.within(high.depth)
    scale = (1 - share) * ends[0] + share * ends[1]
    return VllmPrediction(
        tokens_per_pass=scale * high.within(depth),
        step_seconds=(1 - share) * low.step_seconds + share * high.step_seconds,
        tokens_width=max(low.tokens_width, high.tokens_width),
        seconds_width=max(low.seconds_width, high.seconds_width),
        acceptance=_acceptance(high, depth),
    )


def vllm_plan(lanes: Sequence[VllmCandidate], runs: Sequence[VllmRun], **facts: Any) -> Plan:
    """Returns the plan: every lane that was run, at every draft length from the shortest to the longest.

    Args:
        lanes: Candidates.
        runs: Their runs, and those of plain decoding.
        **facts: Other fields of ``Plan``.

    Raises:
        InvalidRequest: No lane was run.
    """
    known = [lane for lane in lanes if any(run.lane == lane.name for run in runs)]
    if not known:
        raise InvalidRequest("vLLM ran none of the ways to speculate; give others")
    rows = [row for place in _places(runs) for lane in known for row in _rows(lane, runs, *place)]
    return Plan(tuple(mark_best(rows)), tuple(choices(rows)), **facts)


def record(plan: Plan, lanes: Sequence[VllmCandidate], runs: Sequence[VllmRun]) -> dict[str, Any]:
    """Returns the plan and its runs for JSON and HTML pages. The configuration to paste is vLLM's alone."""
    result = plan.to_dict()
    best = plan.best
    for row in result["rows"]:
        row["paste"] = {"vLLM": row["config"]} if row["best"] else None
    return result | {
        "engine": "vllm",
        "exports": {"vllm": best} if best else None,
        "additional_config": dict(chosen(plan, lanes).additional) if best else None,
        "runs": [run.to_dict() for run in runs],
    }


def chosen(plan: Plan, lanes: Sequence[VllmCandidate]) -> VllmCandidate:
    """Returns the lane of the plan's best configuration."""
    name = next(row.name for row in plan.rows if dict(row.config) == plan.best)
    return next(lane for lane in lanes if lane.name == name)


def _places(runs: Sequence[VllmRun]) -> Iterator[tuple[float, int]]:
    yield from dict.fromkeys((run.temperature, run.batch) for run in runs)


def _rows(lane: VllmCandidate, runs: Sequence[VllmRun], temperature: float, batch: int) -> Iterator[PlanRow]:
    here = [run for run in runs if (run.temperature, run.batch) == (temperature, batch)]
    own = [run for run in here if run.lane == lane.name]
    plain = next(run for run in here if run.lane == PLAIN and run.beside in (lane.name, PLAIN))
    for depth in range(min(lane.depths), max(lane.depths) + 1):
        yield _row(lane, depth, own, plain)


def _row(lane: VllmCandidate, depth: int, own: Sequence[VllmRun], plain: VllmRun) -> PlanRow:
    prediction = predict(own, depth)
    mean = prediction.tokens_per_pass
    speedup = mean * plain.step_seconds / prediction.step_seconds
    width = math.sqrt(2) * prediction.tokens_width  # of another sample of as many requests, and of this one
    off = math.hypot(width, math.sqrt(2) * prediction.seconds_width, math.sqrt(2) * plain.seconds_width)
    first, own_first = (median(f for run in each for f in run.first_seconds) for each in ([plain], own))
    tokens = sum(plain.tokens) / len(plain.tokens)
    decoding = tokens / mean * prediction.step_seconds
    return PlanRow(
        name=lane.name,
        method=str(lane.config["method"]),
        config=lane.at(depth),
        temperature=plain.temperature,
        batch=plain.batch,
        tokens_per_pass=mean,
        tokens_per_pass_low=mean * math.exp(-width),
        tokens_per_pass_high=mean * _exp(width),
        speedup=speedup,
        low=speedup * math.exp(-off),
        high=speedup * _exp(off),
        end_to_end=(first + tokens * plain.step_seconds) / (own_first + decoding),
        step_seconds=prediction.step_seconds,
        draft_seconds=math.nan,
        plain_seconds=plain.step_seconds,
        acceptance=prediction.acceptance,
        estimator="runs",
        requests=len(own[0].tokens),
    )


def _acceptance(run: VllmRun, depth: int) -> tuple[float, ...]:
    """By position: passes that accepted so deep over passes that accepted all before it."""
    deeper = [sum(run.emitted[size:]) for size in range(depth + 1)]  # passes that emitted more than ``size`` tokens
    return tuple(after / before for before, after in pairwise(deeper) if before)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
