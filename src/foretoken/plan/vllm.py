"""A plan for vLLM, measured on vLLM itself: short runs at a few draft lengths, the others interpolated.

Tokens per pass at a draft length that was run are those measured. Between two such lengths they follow the longer one's
acceptance, cut at the length and scaled to agree with the shorter one. Step times are interpolated linearly. Every
candidate alternates with plain decoding in a second process, so that a machine that slows down slows both.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from foretoken.bench.output import cores
from foretoken.bench.peers.protocol import Answer, PeerRequest, Setup
from foretoken.bench.peers.registry import BOOT, PEERS, folder
from foretoken.bench.peers.worker import PeerError, PeerWorker
from foretoken.core.errors import InvalidRequest
from foretoken.core.progress import Say
from foretoken.plan.candidates import Candidate, PlanRow
from foretoken.plan.outcome import Plan
from foretoken.plan.statistics import Interval, ratio_interval

CHAIN = (1, 2, 4, 8)  # draft lengths of chains that are run
COPIED = (2, 4, 8)  # draft lengths of methods that copy text
PLAIN = ""  # name of plain decoding among the lanes
_DISTURBED = 3.0  # a step that takes this many times the median was disturbed, and is skipped
_COPIES = ("ngram", "suffix", "custom_class")
_WARM_UP = 8  # tokens of a warm-up request


@dataclass(frozen=True)
class VllmCandidate(Candidate):
    """One way to speculate: vLLM's speculative_config, and its additional_config."""

    additional: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """Name of vLLM's method."""
        return str(self.config["method"])

    @staticmethod
    def of(
        config: Mapping[str, Any],
        name: str = "",
        additional: Mapping[str, Any] | None = None,
        max_depth: int = CHAIN[-1],
    ) -> "VllmCandidate":
        """Returns a candidate from vLLM's speculative_config. name: by default the method and the model's folder.

        max_depth: if ``config`` has no draft length. Raises InvalidRequest for one without a method, or a wrong length.
        """
        keys = dict(config)
        depth, method = keys.pop("num_speculative_tokens", None), keys.get("method")
        if not isinstance(method, str):
            raise InvalidRequest(f"a speculative_config for vLLM needs a 'method', got {dict(config)!r}")
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
            raise InvalidRequest(f"num_speculative_tokens must be an integer of at least 1 in a plan, got {depth!r}")
        usual = COPIED if method in _COPIES else CHAIN
        depths = (depth,) if depth is not None else (*(d for d in usual if d < max_depth), max_depth)
        model = str(keys.get("model", "")).rstrip("/").rpartition("/")[2]
        return VllmCandidate(name or f"{method} {model}".strip(), keys, depths, additional or {})


@dataclass(frozen=True)
class VllmRun:
    """Measurements of one lane at one draft length, over groups of ``batch`` prompts."""

    lane: str  # name of the candidate, PLAIN for plain decoding
    depth: int  # draft length, 0 for plain decoding
    beside: str  # name of the lane with which it alternated
    temperature: float
    batch: int  # sequences at once
    tokens: tuple[int, ...]  # by prompt, without those of the first pass
    passes: tuple[int, ...]  # by prompt, of the target, without the first
    steps: tuple[int, ...]  # by group, number of timed steps
    seconds: tuple[float, ...]  # by group, mean seconds of a step
    emitted: tuple[int, ...]  # number of passes that emitted 1, 2, ... tokens
    first_seconds: tuple[float, ...]  # by group, seconds until every prompt had its first token

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens over target passes."""
        return sum(self.tokens) / max(1, sum(self.passes))

    @property
    def tokens_width(self) -> float:
        """Half the relative width of the interval of tokens per pass. Infinite for one request."""
        return ratio_interval(self.tokens, self.passes).width

    @property
    def step_seconds(self) -> float:
        return self._step_interval.estimate

    @property
    def seconds_width(self) -> float:
        """Half the relative width of the interval of a step's time. 0 for one group, which has no spread."""
        return self._step_interval.width if len(self.steps) > 1 else 0.0

    @property
    def _step_interval(self) -> Interval:
        return ratio_interval([n * each for n, each in zip(self.steps, self.seconds, strict=True)], self.steps)

    def within(self, depth: int) -> float:
        """Returns tokens per pass if every pass accepted at most ``depth`` draft tokens."""
        return sum(min(size, depth + 1) * count for size, count in enumerate(self.emitted, 1)) / sum(self.emitted)

    def acceptance(self, depth: int) -> tuple[float, ...]:
        """Returns by position the passes that accepted that deep over those that accepted all tokens before."""
        deeper = [sum(self.emitted[size:]) for size in range(depth + 1)]  # passes with more than ``size`` tokens
        return tuple(after / before for before, after in pairwise(deeper) if before)


StartProcess = Callable[[VllmCandidate | None], PeerWorker]
"""Starts the process of a lane, None for plain decoding."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Settings of the measurement.

    alone: one process at a time, for targets too large to load twice. Plain decoding is then measured once, before the
    others.
    """

    target: str  # a folder, or a name that vLLM knows
    temperatures: Sequence[float] = (0.0,)
    batches: Sequence[int] = (1,)  # numbers of sequences at once
    max_tokens: int = 64  # per request
    python: Path | None = None  # interpreter of vLLM's environment, None for the one of make peers
    engine: Mapping[str, Any] = field(default_factory=dict)  # further arguments of vllm.LLM
    alone: bool = False

    def command(self) -> list[str]:
        """Returns the command of a worker. Raises InvalidRequest if the interpreter does not exist."""
        python = self.python or PEERS["vllm"].python
        if not python.exists():
            raise InvalidRequest(
                f"no vLLM at {python}; name the Python of its environment with --engine-python, or run `make peers`"
            )
        return [str(python), "-P", str(BOOT), "vllm"]

    def start(self, lane: VllmCandidate | None) -> PeerWorker:
        """Starts a process for all draft lengths of ``lane``, None for plain decoding."""
        engine = dict(self.engine)
        if lane is not None and lane.additional:
            engine["additional_config"] = {**engine.get("additional_config", {}), **lane.additional}
        config = lane.at(max(lane.depths)) if lane is not None else None
        options = (("speculative_config", json.dumps(config)), ("engine", json.dumps(engine)))
        name = lane.name if lane is not None else "plain"
        setup = Setup(
            "vllm", name, self.target, max_length=2048, batch=max(self.batches), threads=cores(), options=options
        )
        log = folder() / "logs" / f"plan-vllm-{re.sub(r'[^A-Za-z0-9]+', '-', name)}.log"
        return PeerWorker(self.command(), setup, log)


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of one lane at one draft length, one for each group of prompts. Other fields as in ``VllmRun``."""

    lane: str
    depth: int
    beside: str
    temperature: float
    batch: int
    groups: tuple[Answer, ...]

    def run(self, groups: Sequence[int] | None = None) -> VllmRun:
        """Returns the run over these groups, None for all. Raises InvalidRequest if nothing was decoded."""
        answers = self.groups if groups is None else [self.groups[i] for i in groups]
        timed = [
            [each for each in answer.step_seconds if each <= _DISTURBED * median(answer.step_seconds)]
            for answer in answers
            if answer.step_seconds
        ]
        if not timed:
            raise InvalidRequest("no step had all sequences in it; give more max_tokens or a smaller batch")
        emitted = [count for answer in answers for count in answer.emitted]
        return VllmRun(
            lane=self.lane,
            depth=self.depth,
            beside=self.beside,
            temperature=self.temperature,
            batch=self.batch,
            tokens=tuple(len(text) - 1 for answer in answers for text in answer.tokens),
            passes=tuple(passes for answer in answers for passes in answer.passes_each),
            steps=tuple(len(seconds) for seconds in timed),
            seconds=tuple(fmean(seconds) for seconds in timed),
            emitted=tuple(emitted.count(size) for size in range(1, max(emitted) + 1)),
            first_seconds=tuple(answer.first_seconds for answer in answers),
        )


def answers(
    bench: Bench,
    lanes: Sequence[VllmCandidate],
    prompts: Sequence[Sequence[int]],
    say: Say = lambda stage, fraction: None,
    start: StartProcess | None = None,
    refused: Callable[[VllmCandidate, PeerError], None] | None = None,
) -> list[Answers]:
    """Runs every lane at its draft lengths, each beside plain decoding.

    Args:
        start: Starts the process of a lane. None is ``bench.start``.
        refused: Called with a lane that vLLM fails to load or run. The others continue.

    Raises:
        InvalidRequest: There are no prompts or lanes.
        PeerError: Plain decoding fails, or a lane does and ``refused`` is None.
    """
    if not prompts or not lanes:
        raise InvalidRequest("a plan needs a prompt and a way to speculate at least")
    begin, result = start or bench.start, list[Answers]()
    stage = 1.0 / (2 * len(lanes) + 1)
    say("plain decoding: vLLM starts", 0.0)
    with closing(begin(None)) as plain:
        if bench.alone:
            result += list(_alternated(bench, [(PLAIN, 0, plain)], PLAIN, prompts))
            plain.close()
        for number, lane in enumerate(lanes):
            say(f"{lane.name}: vLLM starts", (2 * number + 1) * stage)
            try:
                with closing(begin(lane)) as process:
                    say(f"{lane.name}: short runs", (2 * number + 2) * stage)
                    places = [] if bench.alone else [(PLAIN, 0, plain)]
                    places += [(lane.name, depth, process) for depth in lane.depths]
                    result += list(_alternated(bench, places, lane.name, prompts))  # of a lane that fails, none count
            except PeerError as error:
                if refused is None:
                    raise
                refused(lane, error)
    return result


def _alternated(
    bench: Bench, places: Sequence[tuple[str, int, PeerWorker]], beside: str, prompts: Sequence[Sequence[int]]
) -> Iterator[Answers]:
    """Runs all places (lane, draft length, process) on every group of prompts, in rotating order."""
    for temperature in bench.temperatures:
        for batch in bench.batches:
            groups = grouped(prompts, batch)
            for _, depth, process in places:
                process.answer(PeerRequest(groups[0], _WARM_UP, temperature, depth))
            for _, depth, process in places:  # a request without prompts resets proposers that learn
                process.answer(PeerRequest([], 0, temperature, depth))
            completed: list[list[Answer]] = [[] for _ in places]
            for turn, group in enumerate(groups):
                for i in range(len(places)):
                    at = (i + turn) % len(places)
                    _, depth, process = places[at]
                    completed[at].append(process.answer(PeerRequest(group, bench.max_tokens, temperature, depth)))
            for (lane, depth, _), times in zip(places, completed, strict=True):
                yield Answers(lane, depth, beside, temperature, batch, tuple(times))


def grouped(prompts: Sequence[Sequence[int]], batch: int) -> list[list[list[int]]]:
    """Returns groups of ``batch`` prompts. The last one is filled up with the first prompts."""
    count = -(-len(prompts) // batch) * batch
    return [[list(prompts[j % len(prompts)]) for j in range(i, i + batch)] for i in range(0, count, batch)]


@dataclass(frozen=True)
class VllmPrediction:
    """Prediction for one lane at one draft length. Widths are half the relative width of an interval."""

    tokens_per_pass: float
    step_seconds: float
    tokens_width: float
    seconds_width: float
    acceptance: tuple[float, ...]


def predict(runs: Sequence[VllmRun], depth: int) -> VllmPrediction:
    """Predicts from the same lane's ``runs`` at this, or a shorter and a longer draft length; else InvalidRequest."""
    ordered = sorted(runs, key=lambda run: run.depth)
    below, above = [r for r in ordered if r.depth <= depth], [r for r in ordered if r.depth >= depth]
    if not below or not above:
        known = ", ".join(str(run.depth) for run in ordered)
        raise InvalidRequest(f"depth {depth} lies outside those that were run: {known}")
    low, high = below[-1], above[0]
    share = (depth - low.depth) / max(1, high.depth - low.depth)
    ends = low.tokens_per_pass / high.within(low.depth), high.tokens_per_pass / high.within(high.depth)
    return VllmPrediction(
        tokens_per_pass=((1 - share) * ends[0] + share * ends[1]) * high.within(depth),
        step_seconds=(1 - share) * low.step_seconds + share * high.step_seconds,
        tokens_width=max(low.tokens_width, high.tokens_width),
        seconds_width=max(low.seconds_width, high.seconds_width),
        acceptance=high.acceptance(depth),
    )


def vllm_plan(lanes: Sequence[VllmCandidate], runs: Sequence[VllmRun], **facts: Any) -> Plan:
    """Returns the plan: every lane that was run, at every draft length from the shortest to the longest.

    runs: of the lanes and of plain decoding. facts: other fields of ``Plan``. Raises InvalidRequest if no lane was run.
    """
    measured = [lane for lane in lanes if any(run.lane == lane.name for run in runs)]
    if not measured:
        raise InvalidRequest("vLLM ran none of the ways to speculate; give others")
    rows = []
    for temperature, batch in dict.fromkeys((run.temperature, run.batch) for run in runs):
        here = [run for run in runs if (run.temperature, run.batch) == (temperature, batch)]
        for lane in measured:
            speculative = [run for run in here if run.lane == lane.name]
            plain = next(run for run in here if run.lane == PLAIN and run.beside in (lane.name, PLAIN))
            depths = range(min(lane.depths), max(lane.depths) + 1)
            rows += [_row(lane, depth, speculative, plain) for depth in depths]
    return Plan.of(rows, **facts)


def _row(lane: VllmCandidate, depth: int, runs: Sequence[VllmRun], plain: VllmRun) -> PlanRow:
    prediction = predict(runs, depth)
    first, plain_first = (median(s for run in each for s in run.first_seconds) for each in (runs, [plain]))
    return PlanRow.predicted(
        lane,
        depth,
        tokens=prediction.tokens_per_pass,
        tokens_width=math.sqrt(2) * prediction.tokens_width,  # of another sample of as many requests, and of this one
        seconds_width=math.sqrt(2) * math.hypot(prediction.seconds_width, plain.seconds_width),
        first=(plain_first, first),
        decoded=sum(plain.tokens) / len(plain.tokens),
        temperature=plain.temperature,
        batch=plain.batch,
        step_seconds=prediction.step_seconds,
        draft_seconds=math.nan,
        plain_seconds=plain.step_seconds,
        acceptance=prediction.acceptance,
        estimator="runs",
        requests=len(runs[0].tokens),
    )


def record(plan: Plan, lanes: Sequence[VllmCandidate], runs: Sequence[VllmRun]) -> dict[str, Any]:
    """Returns the plan and its runs for JSON and HTML pages. The configuration to paste is vLLM's alone."""
    result, best = plan.to_dict(), plan.best
    for row in result["rows"]:
        row["paste"] = {"vLLM": row["config"]} if row["best"] else None
    return result | {
        "engine": "vllm",
        "exports": {"vllm": best} if best else None,
        "additional_config": dict(chosen(plan, lanes).additional) if best else None,
        "runs": [asdict(run) for run in runs],
    }


def chosen(plan: Plan, lanes: Sequence[VllmCandidate]) -> VllmCandidate:
    """Returns the lane of the plan's best configuration."""
    name = next(row.name for row in plan.rows if dict(row.config) == plan.best)
    return next(lane for lane in lanes if lane.name == name)
