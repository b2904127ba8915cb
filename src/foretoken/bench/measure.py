"""Times of one completion, of the parts of its decode steps, and from the start of a process to the first token."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, Self, TypeVar

from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.costs.measured import TimeSpread
from foretoken.outputs import CompletionOutput, StreamPiece
from foretoken.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.llm import LLM


Key = TypeVar("Key", bound=Hashable)

QUIET_SECONDS = 0.01  # before each turn: the threads of the task before, those of torch for instance, may still spin


@dataclass(frozen=True)
class TimedTask:
    """A task to time."""

    # the timed function. If it returns seconds, these count instead of the measured ones.
    run: Callable[[], float | None]
    reset: Callable[[], None] = lambda: None  # restores the state after a run, untimed
    burst: int = 1  # runs per turn, for tasks so short that the previous turn's cache effects would show

    def seconds(self) -> float:
        """Runs one turn. Returns the mean seconds of a run."""
        total = 0.0
        for _ in range(self.burst):
            started = perf_counter()
            reported = self.run()
            total += perf_counter() - started if reported is None else reported
            self.reset()
        return total / self.burst


def interleaved(
    tasks: Mapping[Key, TimedTask], turns: int, track: Callable[[Sequence[int]], Iterable[int]] = iter
) -> dict[Key, TimeSpread]:
    """Runs every task once untimed, then ``turns`` times in rotating order. ``track`` wraps the turns for progress."""
    keys = list(tasks)
    seconds: dict[Key, list[float]] = {key: [] for key in keys}
    for key in keys:
        tasks[key].seconds()
    for turn in track(range(turns)):
        for i in range(len(keys)):
            key = keys[(i + turn) % len(keys)]
            sleep(QUIET_SECONDS)
            seconds[key].append(tasks[key].seconds())
    return {key: TimeSpread.of(values) for key, values in seconds.items()}


class Stopwatch:
    """Sums the seconds spent inside methods of objects, while it is open.

    Attributes:
        seconds: Seconds inside all methods.

    methods: Objects with a method's name each.
    """

    def __init__(self, methods: Iterable[tuple[Any, str]]) -> None:
        self.seconds, self._methods = 0.0, list(methods)

    def __enter__(self) -> Self:
        for owner, name in self._methods:
            setattr(owner, name, self._timed(getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name in self._methods:
            delattr(owner, name)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += perf_counter() - started

        return measured


OnPiece = Callable[[StreamPiece, float], None]


@dataclass(frozen=True)
class TimedCompletion:
    """One timed completion of one prompt."""

    output: CompletionOutput  # the completion
    seconds: float  # total seconds, prefill included

    @property
    def tokens(self) -> int:
        return len(self.output.token_ids)


def timed(llm: LLM, prompt: str, params: SamplingParams, on_piece: OnPiece | None = None) -> TimedCompletion:
    """Completes ``prompt`` once. ``on_piece`` receives each piece and the seconds so far; its own time is excluded."""
    if params.n != 1:
        raise InvalidRequest(f"a timed run makes one completion; got n={params.n}")
    seconds = 0.0
    output: CompletionOutput | None = None
    for piece, took in _with_seconds(llm.stream(prompt, params)):
        seconds += took
        output = piece.output or output
        if on_piece is not None:
            on_piece(piece, seconds)
    if output is None:
        raise RuntimeError("the stream ended without a finished completion")
    return TimedCompletion(output, seconds)


def _with_seconds(pieces: Iterator[StreamPiece]) -> Iterator[tuple[StreamPiece, float]]:
    """Yields each piece with the seconds until it came."""
    while True:
        started = perf_counter()
        piece = next(pieces, None)
        seconds = perf_counter() - started
        if piece is None:
            return
        yield piece, seconds


@dataclass(frozen=True)
class StepTimes:
    """Seconds over all steps but each prompt's first, which includes prefill."""

    steps: int
    tokens: int
    total: float
    target: float  # forward passes of the target, inside ``Model.score``
    draft: float  # forward passes of the draft model
    propose: float  # the proposer without its passes
    verify: float  # as in ``Timings``
    commit: float  # as in ``Timings``

    @property
    def other(self) -> float:
        """Seconds of the engine, detokenization and the stream."""
        return self.total - self.target - self.draft - self.propose - self.verify - self.commit

    @property
    def outside(self) -> float:
        """The share of a step outside forward passes."""
        return 1 - (self.target + self.draft) / self.total if self.total else 0.0

    def per_step(self) -> dict[str, float]:
        parts = [f.name for f in fields(self) if f.name not in ("steps", "tokens")]
        return {name: getattr(self, name) / max(1, self.steps) for name in (*parts, "other")}


def step_times(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> StepTimes:
    """Times decode steps of one prompt after another through ``LLM.stream``."""
    drafter = _draft_model(llm)
    names = ("score", "chains") if drafter is not None else ()
    steps, tokens, seconds = 0, 0, dict.fromkeys((f.name for f in fields(StepTimes)[2:]), 0.0)
    with Stopwatch([(drafter, name) for name in names]) as watch:
        for prompt in prompts:
            pieces = _with_seconds(llm.stream(prompt, params))
            next(pieces, None)
            before = watch.seconds
            for piece, wall in pieces:
                drafting, before, laps = watch.seconds - before, watch.seconds, piece.step.timings
                parts = {"target": laps.score, "draft": drafting, "propose": laps.propose - drafting}
                parts |= {"verify": laps.verify, "commit": laps.commit, "total": wall}
                seconds = {name: seconds[name] + value for name, value in parts.items()}
                steps, tokens = steps + 1, tokens + len(piece.token_ids)
    return StepTimes(steps, tokens, **seconds)


def _draft_model(llm: LLM) -> Any:
    """Returns the draft model of the default method; None if it has none."""
    from foretoken.propose.union import Union

    proposer: Any = llm.proposer_of(llm.methods[0])
    if isinstance(proposer, Union):
        proposer = proposer.model and proposer.model.proposer
    return getattr(proposer, "model", None)


_PROGRAM = """
import json, sys
from foretoken import LLM, SamplingParams
from foretoken.bench.output import memory
imported = memory("VmHWM")
llm = LLM(**json.loads(sys.argv[1]))
for _ in llm.stream("def", SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)):
    pass
print(json.dumps({"imported": imported, "peak": memory("VmHWM")}), flush=True)
"""


@dataclass(frozen=True)
class Startup:
    """Startup of one model. seconds: median. peak_bytes: peak resident memory. imported_bytes: peak before loading."""

    name: str
    seconds: float
    low: float
    high: float
    peak_bytes: int
    imported_bytes: int


def startup(name: str, options: dict[str, Any], times: int) -> Startup:
    """Times ``LLM(**options)`` and its first token, ``times`` times after one warm-up. Raises ForetokenError."""
    seconds: list[float] = []
    reported = {"peak": 0, "imported": 0}
    for _ in range(times + 1):
        took, reported = fresh_process(_PROGRAM, [json.dumps(options)])
        seconds.append(took)
    warm = seconds[1:]
    return Startup(name, median(warm), min(warm), max(warm), reported["peak"], reported["imported"])


def fresh_process(
    program: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[float, dict[str, Any]]:
    """Runs a program that prints one line of JSON.

    Returns:
        The seconds until the line, and its content.

    Raises:
        ForetokenError: The program failed; the message has its last line.
    """
    with tempfile.TemporaryFile("w+") as errors:
        started, command = perf_counter(), [sys.executable, "-c", program, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = perf_counter() - started
        if process.returncode or not line:
            errors.seek(0)
            reason = (errors.read().strip().splitlines() or ["no reason given"])[-1]
            raise ForetokenError(f"a fresh process could not produce a token: {reason}")
    answer: dict[str, Any] = json.loads(line)
    return seconds, answer
