"""A plan for vLLM, measured on vLLM itself: short runs at a few depths, from which the other depths follow.

Tokens per pass at a depth that was run are what came out. Between two such depths they follow the deeper one's
acceptances, cut at the depth asked about and scaled to agree with the shallower one; the time of a round lies on the
line between theirs. Every way to speculate takes turns with plain decoding in a second process, so that a machine that
slows down slows both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from foretoken.bench.peers.vllm_rounds import VllmStepTimes
from foretoken.core.errors import InvalidRequest
from foretoken.plan.outcome import Plan, choices, mark
from foretoken.plan.rows import PlanRow
from foretoken.plan.statistics import ratio_interval

LEVEL = 0.95
CHAIN = (1, 2, 4, 8)
COPIED = (2, 4, 8)
PLAIN = ""
_DISTURBED = 3.0  # a round that took so many times the usual one says nothing about the engine
_COPIES = ("ngram", "suffix", "custom_class")


@dataclass(frozen=True)
class VllmCandidate:
    """One way to speculate. config: vLLM's, without its depth. additional: its additional_config. depths: to be run."""

    name: str
    config: Mapping[str, Any]
    depths: tuple[int, ...]
    additional: Mapping[str, Any] = field(default_factory=dict)

    def at(self, depth: int) -> dict[str, Any]:
        """The ``speculative_config`` to paste."""
        return {**self.config, "num_speculative_tokens": depth}

    @staticmethod
    def of(
        config: Mapping[str, Any], name: str = "", additional: Mapping[str, Any] | None = None, most: int = CHAIN[-1]
    ) -> VllmCandidate:
        """From vLLM's speculative_config, at depths up to ``most`` where it gives none.

        Raises InvalidRequest where it names no method, or no depth that can be.
        """
        own = dict(config)
        depth, method = own.pop("num_speculative_tokens", None), own.get("method")
        if not isinstance(method, str):
            raise InvalidRequest(f"a speculative_config for vLLM needs a 'method', got {dict(config)!r}")
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
            raise InvalidRequest(f"num_speculative_tokens must be an integer of at least 1 in a plan, got {depth!r}")
        usual = COPIED if method in _COPIES else CHAIN
        depths = (depth,) if depth is not None else (*(d for d in usual if d < most), most)
        model = str(own.get("model", "")).rstrip("/").rpartition("/")[2]
        return VllmCandidate(name or f"{method} {model}".strip(), own, depths, additional or {})


@dataclass(frozen=True)
class VllmRun:
    """What one lane did at one depth, over groups of ``batch`` prompts.

    lane, depth: ``PLAIN`` and 0 for plain decoding. beside: the lane it took turns with. tokens, passes: by prompt,
    without its first pass. rounds, seconds: by group, rounds and the mean of their times. emitted: passes that brought
    1, 2, ... tokens. first_seconds: by group, until every prompt had its first token.
    """

    lane: str
    depth: int
    beside: str
    temperature: float
    batch: int
    tokens: tuple[int, ...]
    passes: tuple[int, ...]
    rounds: tuple[int, ...]
    seconds: tuple[float, ...]
    emitted: tuple[int, ...]
    first_seconds: tuple[float, ...]

    @staticmethod
    def of(answers: Sequence[VllmStepTimes], **place: Any) -> VllmRun:
        """From what a worker answered, a group each. Raises InvalidRequest where nothing was decoded."""
        timed = [_undisturbed(answer.seconds) for answer in answers if answer.seconds]
        if not timed:
            raise InvalidRequest("no round had all sequences in it; give more max_tokens or a smaller batch")
        emitted = [count for answer in answers for count in answer.emitted]
        return VllmRun(
            tokens=tuple(len(text) - 1 for answer in answers for text in answer.tokens),
            passes=tuple(passes for answer in answers for passes in answer.passes),
            rounds=tuple(len(seconds) for seconds in timed),
            seconds=tuple(sum(seconds) / len(seconds) for seconds in timed),
            emitted=tuple(emitted.count(size) for size in range(1, max(emitted) + 1)),
            first_seconds=tuple(answer.first_seconds for answer in answers),
            **place,
        )

    @staticmethod
    def read(record: Mapping[str, Any]) -> VllmRun:
        """From JSON."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
        return VllmRun(**fields)

    @property
    def tokens_per_pass(self) -> float:
        return sum(self.tokens) / max(1, sum(self.passes))

    @property
    def round_seconds(self) -> float:
        return sum(n * s for n, s in zip(self.rounds, self.seconds, strict=True)) / sum(self.rounds)

    @property
    def tokens_width(self) -> float:
        """Half the interval's width of tokens per pass, in parts of it; endless for one request."""
        return _width(self.tokens, self.passes)

    @property
    def seconds_width(self) -> float:
        """That of a round's time; none for one group, of which nothing can be said."""
        if len(self.rounds) < 2:
            return 0.0
        return _width([n * s for n, s in zip(self.rounds, self.seconds, strict=True)], self.rounds)

    def within(self, depth: int) -> float:
        """Tokens per pass had no pass accepted more than ``depth`` drafted tokens."""
        return sum(min(size, depth + 1) * count for size, count in enumerate(self.emitted, 1)) / sum(self.emitted)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Foretold:
    """Of one lane at one depth: tokens per pass, a round's seconds, and the widths of their intervals."""

    tokens_per_pass: float
    round_seconds: float
    tokens_width: float
    seconds_width: float
    acceptance: tuple[float, ...]


def foretold(runs: Sequence[VllmRun], depth: int) -> Foretold:
    """From the same lane's ``runs`` at other depths, or this one. Raises InvalidRequest outside of them."""
    by_depth = {run.depth: run for run in runs}
    if depth in by_depth:
        run = by_depth[depth]
        return Foretold(
            run.tokens_per_pass, run.round_seconds, run.tokens_width, run.seconds_width, _acceptance(run, depth)
        )
    if not min(by_depth, default=0) < depth < max(by_depth, default=0):
        raise InvalidRequest(f"depth {depth} lies outside those that were run: {', '.join(map(str, sorted(by_depth)))}")
    low = by_depth[max(known for known in by_depth if known < depth)]
    high = by_depth[min(known for known in by_depth if known > depth)]
    share = (depth - low.depth) / (high.depth - low.depth)
    ends = low.tokens_per_pass / high.within(low.depth), high.tokens_per_pass / high.within(high.depth)
    scale = (1 - share) * ends[0] + share * ends[1]
    return Foretold(
        tokens_per_pass=scale * high.within(depth),
        round_seconds=(1 - share) * low.round_seconds + share * high.round_seconds,
        tokens_width=max(low.tokens_width, high.tokens_width),
        seconds_width=max(low.seconds_width, high.seconds_width),
        acceptance=_acceptance(high, depth),
    )


def planned(lanes: Sequence[VllmCandidate], runs: Sequence[VllmRun], **facts: Any) -> Plan:
    """Every lane that was run, at every depth from the shallowest to the deepest. facts: see ``Plan``.

    Raises InvalidRequest where none was.
    """
    known = [lane for lane in lanes if any(run.lane == lane.name for run in runs)]
    if not known:
        raise InvalidRequest("vLLM ran none of the ways to speculate; give others")
    rows = [row for place in _places(runs) for lane in known for row in _rows(lane, runs, *place)]
    return Plan(tuple(mark(rows)), tuple(choices(rows)), **facts)


def record(plan: Plan, lanes: Sequence[VllmCandidate], runs: Sequence[VllmRun]) -> dict[str, Any]:
    """All of it for JSON and pages; what to paste is vLLM's alone."""
    found = plan.to_dict()
    best = plan.best
    for row in found["rows"]:
        row["paste"] = {"vLLM": row["config"]} if row["best"] else None
    return found | {
        "engine": "vllm",
        "exports": {"vllm": best} if best else None,
        "additional_config": dict(chosen(plan, lanes).additional) if best else None,
        "runs": [run.to_dict() for run in runs],
    }


def chosen(plan: Plan, lanes: Sequence[VllmCandidate]) -> VllmCandidate:
    """The lane of the plan's best configuration."""
    name = next(row.name for row in plan.rows if dict(row.config) == plan.best)
    return next(lane for lane in lanes if lane.name == name)


def _places(runs: Sequence[VllmRun]) -> Iterator[tuple[float, int]]:
    yield from dict.fromkeys((run.temperature, run.batch) for run in runs)


def _rows(lane: VllmCandidate, runs: Sequence[VllmRun], temperature: float, batch: int) -> Iterator[PlanRow]:
    here = [run for run in runs if (run.temperature, run.batch) == (temperature, batch)]
    mine = [run for run in here if run.lane == lane.name]
    plain = next(run for run in here if run.lane == PLAIN and run.beside in (lane.name, PLAIN))
    for depth in range(min(lane.depths), max(lane.depths) + 1):
        found = foretold(mine, depth)
        gain = found.tokens_per_pass * plain.round_seconds / found.round_seconds
        width = math.sqrt(2) * found.tokens_width  # of another sample of as many requests, and this one's
        off = math.hypot(width, math.sqrt(2) * found.seconds_width, math.sqrt(2) * plain.seconds_width)
        first, own_first = (median(f for run in each for f in run.first_seconds) for each in ([plain], mine))
        tokens = sum(plain.tokens) / len(plain.tokens)
        rest = tokens / found.tokens_per_pass * found.round_seconds
        yield PlanRow(
            name=lane.name, method=str(lane.config["method"]), config=lane.at(depth), temperature=temperature,
            batch=batch, tokens_per_pass=found.tokens_per_pass,
            tokens_per_pass_low=found.tokens_per_pass * math.exp(-width),
            tokens_per_pass_high=found.tokens_per_pass * _exp(width), speedup=gain, low=gain * math.exp(-off),
            high=gain * _exp(off), end_to_end=(first + tokens * plain.round_seconds) / (own_first + rest),
            round_seconds=found.round_seconds, draft_seconds=math.nan, plain_seconds=plain.round_seconds,
            acceptance=found.acceptance, estimator="runs", requests=len(mine[0].tokens),
        )  # fmt: skip


def _undisturbed(seconds: Sequence[float]) -> list[float]:
    """Rounds that nothing else held up."""
    most = _DISTURBED * median(seconds)
    return [each for each in seconds if each <= most]


def _width(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    found = ratio_interval(numerators, denominators, LEVEL)
    return (found.high - found.low) / 2 / found.estimate


def _acceptance(run: VllmRun, depth: int) -> tuple[float, ...]:
    """By position: passes that accepted so deep over passes that accepted all before it."""
    deeper = [sum(run.emitted[size:]) for size in range(depth + 1)]  # passes with more than so many tokens
    return tuple(after / before for before, after in pairwise(deeper) if before)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
