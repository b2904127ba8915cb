"""A plan for vLLM, measured on vLLM itself: short runs at a few draft lengths, the others interpolated.

Tokens per pass at a draft length that was run are those measured. Between two such lengths they follow the longer one's
acceptance, cut at the length and scaled to agree with the shorter one. Step times are interpolated linearly. Every
candidate alternates with plain decoding in a second process, so that a machine that slows down slows both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from foretoken.bench.peers.vllm_steps import VllmStepTimes
from foretoken.core.errors import InvalidRequest
from foretoken.plan.outcome import Plan, choices, mark_best
from foretoken.plan.rows import PlanRow
from foretoken.plan.statistics import ratio_interval

LEVEL = 0.95
CHAIN = (1, 2, 4, 8)  # draft lengths of chains that are run
COPIED = (2, 4, 8)  # draft lengths of methods that copy text
PLAIN = ""  # name of plain decoding among the lanes
_DISTURBED = 3.0  # a step that takes this many times the median was disturbed, and is left out
_COPIES = ("ngram", "suffix", "custom_class")


@dataclass(frozen=True)
class VllmCandidate:
    """One way to speculate.

    Args:
        name: Unique within a plan.
        config: vLLM's speculative_config without num_speculative_tokens.
        depths: Draft lengths to be run.
        additional: vLLM's additional_config.
    """

    name: str
    config: Mapping[str, Any]
    depths: tuple[int, ...]
    additional: Mapping[str, Any] = field(default_factory=dict)

    def at(self, depth: int) -> dict[str, Any]:
        """Returns the ``speculative_config`` with ``depth`` draft tokens."""
        return {**self.config, "num_speculative_tokens": depth}

    @staticmethod
    def of(
        config: Mapping[str, Any],
        name: str = "",
        additional: Mapping[str, Any] | None = None,
        max_depth: int = CHAIN[-1],
    ) -> VllmCandidate:
        """Returns a candidate from vLLM's speculative_config.

        Args:
            config: vLLM's speculative_config.
            name: Name, by default the method and the model's folder.
            additional: vLLM's additional_config.
            max_depth: Greatest draft length where ``config`` gives none.

        Raises:
            InvalidRequest: The configuration names no method, or an impossible draft length.
        """
        own = dict(config)
        depth, method = own.pop("num_speculative_tokens", None), own.get("method")
        if not isinstance(method, str):
            raise InvalidRequest(f"a speculative_config for vLLM needs a 'method', got {dict(config)!r}")
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
            raise InvalidRequest(f"num_speculative_tokens must be an integer of at least 1 in a plan, got {depth!r}")
        usual = COPIED if method in _COPIES else CHAIN
        depths = (depth,) if depth is not None else (*(d for d in usual if d < max_depth), max_depth)
        model = str(own.get("model", "")).rstrip("/").rpartition("/")[2]
        return VllmCandidate(name or f"{method} {model}".strip(), own, depths, additional or {})


@dataclass(frozen=True)
class VllmRun:
    """Measurements of one lane at one draft length, over groups of ``batch`` prompts.

    Args:
        lane: Name of the candidate, ``PLAIN`` for plain decoding.
        depth: Draft length, 0 for plain decoding.
        beside: Name of the lane with which it alternated.
        temperature: Sampling temperature.
        batch: Sequences at once.
        tokens: By prompt, tokens without those of the first pass.
        passes: By prompt, target passes without the first.
        steps: By group, number of timed steps.
        seconds: By group, mean seconds of a step.
        emitted: Number of passes that emitted 1, 2, ... tokens.
        first_seconds: By group, seconds until every prompt had its first token.
    """

    lane: str
    depth: int
    beside: str
    temperature: float
    batch: int
    tokens: tuple[int, ...]
    passes: tuple[int, ...]
    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    emitted: tuple[int, ...]
    first_seconds: tuple[float, ...]

    @staticmethod
    def of(answers: Sequence[VllmStepTimes], **place: Any) -> VllmRun:
        """Returns a run from a worker's answers, one per group. Raises InvalidRequest where nothing was decoded."""
        timed = [_undisturbed(answer.seconds) for answer in answers if answer.seconds]
        if not timed:
            raise InvalidRequest("no step had all sequences in it; give more max_tokens or a smaller batch")
        emitted = [count for answer in answers for count in answer.emitted]
        return VllmRun(
            tokens=tuple(len(text) - 1 for answer in answers for text in answer.tokens),
            passes=tuple(passes for answer in answers for passes in answer.passes),
            steps=tuple(len(seconds) for seconds in timed),
            seconds=tuple(sum(seconds) / len(seconds) for seconds in timed),
            emitted=tuple(emitted.count(size) for size in range(1, max(emitted) + 1)),
            first_seconds=tuple(answer.first_seconds for answer in answers),
            **place,
        )

    @staticmethod
    def read(record: Mapping[str, Any]) -> VllmRun:
        """Returns a run from JSON."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
        return VllmRun(**fields)

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens over target passes."""
        return sum(self.tokens) / max(1, sum(self.passes))

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step."""
        return sum(n * s for n, s in zip(self.steps, self.seconds, strict=True)) / sum(self.steps)

    @property
    def tokens_width(self) -> float:
        """Half the relative width of the interval of tokens per pass. Infinite for one request."""
        return _width(self.tokens, self.passes)

    @property
    def seconds_width(self) -> float:
        """Half the relative width of the interval of a step's time. 0 for one group, which has no spread."""
        if len(self.steps) < 2:
            return 0.0
        return _width([n * s for n, s in zip(self.steps, self.seconds, strict=True)], self.steps)

    def within(self, depth: int) -> float:
        """Returns tokens per pass if every pass accepted at most ``depth`` draft tokens."""
        return sum(min(size, depth + 1) * count for size, count in enumerate(self.emitted, 1)) / sum(self.emitted)

    def to_dict(self) -> dict[str, Any]:
        """Returns the run for JSON."""
        return asdict(self)


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


def _undisturbed(seconds: Sequence[float]) -> list[float]:
    """Leaves out disturbed steps."""
    longest = _DISTURBED * median(seconds)
    return [each for each in seconds if each <= longest]


def _width(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    interval = ratio_interval(numerators, denominators, LEVEL)
    return (interval.high - interval.low) / 2 / interval.estimate


def _acceptance(run: VllmRun, depth: int) -> tuple[float, ...]:
    """By position: passes that accepted so deep over passes that accepted all before it."""
    deeper = [sum(run.emitted[size:]) for size in range(depth + 1)]  # passes that emitted more than ``size`` tokens
    return tuple(after / before for before, after in pairwise(deeper) if before)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
