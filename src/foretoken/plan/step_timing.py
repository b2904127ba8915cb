"""Timing of decode steps: the real engine with the real proposer, alternating with plain decoding.

A step includes drafting, the target's pass, sampling distributions, verification and the KV cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import median
from time import perf_counter
from typing import NamedTuple, TypeVar

from foretoken.control.fixed import Fixed
from foretoken.core.distributions import Law
from foretoken.engine.loop import Engine
from foretoken.engine.prompts import TokenizedPrompt
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.plan.texts import Prompt, SampledText, contexts
from foretoken.propose.base import Proposer

PLAIN = ""  # name of plain decoding among the lanes
Key = TypeVar("Key")
Result = TypeVar("Result")
MAX_OPEN = 32  # open sequences: those of plain decoding, and of as many lanes as fit beside it
LANES_PER_PLAIN = 4  # lanes between two stretches of plain decoding, because a machine's speed changes within seconds
_STRETCH = 4  # consecutive timed steps of one lane
_COLD = 2  # steps before them that are not timed
_WARM_UP = 2  # steps after the prompt's that are not timed
_SETTLING = 6  # steps after which a small model is as fast as among other lanes
_PREFILLS = 3  # timed prefills of the same prompts
_UNLIMITED = 1 << 30
_ids = count(1 << 40)  # ids of contexts, unique across lanes because lanes share proposers


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step of a whole batch, in seconds: of the step, of drafting, and of the target's pass over ``rows`` rows."""

    seconds: float
    propose: float
    score: float
    rows: int


@dataclass(slots=True)
class TimedBatch:
    """A batch that is decoded without end. It restarts when a sequence reaches the model's length."""

    target: Model
    proposer: Proposer
    depth: int  # draft length or tree size
    prompts: Sequence[Prompt]  # one per sequence
    law: Law
    prefill: float = 0.0  # seconds of the step that held the prompts
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = Engine(self.target, self.proposer, Fixed(self.depth), max_sequences=len(self.prompts))
        self._begin()

    def step(self) -> TimedStep:
        """Runs and times one step."""
        if len(self.engine.running) < len(self.prompts):
            self._begin()
        started = perf_counter()
        steps = self.engine.step_or_raise()
        seconds = perf_counter() - started
        timings, rows = steps[0].timings, sum(len(step.draft) + 1 for step in steps)
        return TimedStep(seconds, timings.propose, timings.score, rows)

    def close(self) -> None:
        """Frees the sequences."""
        self.engine.clear()

    def _begin(self) -> None:
        self.close()
        for context in contexts(self.prompts, self.law, 0):
            context.id = next(_ids)
            self.engine.add(context, Length(_UNLIMITED))
        started = perf_counter()
        self.engine.step_or_raise()
        self.prefill = perf_counter() - started
        for _ in range(_WARM_UP):
            if len(self.engine.running) == len(self.prompts):
                self.engine.step_or_raise()


class LaneTimes(NamedTuple):
    """Timed steps of one lane, and of plain decoding beside each."""

    steps: Sequence[TimedStep]
    plain: Sequence[TimedStep]


Visit = Mapping[str, LaneTimes]
"""Lanes that were timed at one moment, by name."""


def time_lanes(
    target: Model,
    lanes: Mapping[str, tuple[Proposer, int]],
    prompts: Sequence[Prompt],
    law: Law,
    steps: int,
    tick: Callable[[int], None] = lambda steps: None,
) -> dict[str, LaneTimes]:
    """Times lanes that alternate with each other and with plain decoding.

    Args:
        target: Target model.
        lanes: A proposer and a draft length by name.
        prompts: One per sequence of the batch.
        law: Sampling distribution.
        steps: Timed steps per lane.
        tick: Called now and then with the number of steps timed since, those of plain decoding not counted.
    """
    ordered, result = list(lanes.items()), dict[str, LaneTimes]()
    together = max(1, MAX_OPEN // len(prompts) - 1)
    for start in range(0, len(ordered), together):
        group = {PLAIN: (Proposer(), 0), **dict(ordered[start : start + together])}
        with ExitStack() as stack:
            running = {
                name: stack.enter_context(closing(TimedBatch(target, *lane, prompts, law)))
                for name, lane in group.items()
            }
            result |= alternate(running, steps, tick)
    return result


def time_plain_pass(target: Model, prompts: Sequence[Prompt], law: Law) -> float:
    """Returns the seconds of the target's pass in plain decoding of ``prompts`` at this moment."""
    with closing(TimedBatch(target, Proposer(), 0, prompts, law)) as lane:
        for _ in range(_SETTLING):
            lane.step()
        return median(lane.step().score for _ in range(_STRETCH))


class PrefillTiming(NamedTuple):
    """Seconds of the step that holds a batch's prompts, and by proposer its time with it over that."""

    seconds: float
    over_plain: Mapping[str, float]


def time_prefill(
    target: Model, proposers: Mapping[str, Proposer], prompts: Sequence[Prompt], law: Law
) -> PrefillTiming:
    """Times prefill of ``prompts`` with each proposer. There must be no prefix cache yet."""

    def run(name: str) -> float:
        lane = TimedBatch(target, proposers.get(name) or Proposer(), 1, prompts, law)
        lane.close()
        return lane.prefill

    run(PLAIN)  # the first pass reads weights that are in no cache
    timed = [each for _ in range(_PREFILLS) for each in interleave(list(proposers), PLAIN, run)]
    ratios = defaultdict(list)
    for name, own, plain in timed:
        ratios[name].append(own / plain)
    return PrefillTiming(median(plain for *_, plain in timed), {name: median(own) for name, own in ratios.items()})


def alternate(running: Mapping[str, TimedBatch], steps: int, tick: Callable[[int], None]) -> dict[str, LaneTimes]:
    """Times a stretch of each lane in rotating order, with plain decoding in the midst of every few lanes.

    With one stretch of plain steps for all lanes, its chance error would be theirs.
    """
    keys = [key for key in running if key != PLAIN]
    timed: dict[str, tuple[list[TimedStep], list[TimedStep]]] = {key: ([], []) for key in keys}
    for first in range(0, steps, _STRETCH):
        count = min(_STRETCH, steps - first)
        start = first // _STRETCH % len(keys)
        for key, own, plain in interleave(keys[start:] + keys[:start], PLAIN, partial(_stretch, running, count)):
            timed[key][0].extend(own)
            timed[key][1].extend(plain)
        tick(count * len(keys))
    return {key: LaneTimes(*times) for key, times in timed.items()}


def interleave(keys: Sequence[Key], plain: Key, run: Callable[[Key], Result]) -> Iterator[tuple[Key, Result, Result]]:
    """Runs all keys in turn, with ``plain`` in the midst of every few. Yields each key, its result and plain's."""
    for at in range(0, len(keys), LANES_PER_PLAIN):
        near = keys[at : at + LANES_PER_PLAIN]
        middle = len(near) // 2
        results = [run(key) for key in near[:middle]]
        base = run(plain)
        results += [run(key) for key in near[middle:]]
        yield from ((key, own, base) for key, own in zip(near, results, strict=True))


def _stretch(running: Mapping[str, TimedBatch], count: int, name: str) -> list[TimedStep]:
    """Times ``count`` steps of a lane. The steps before them load its weights into the processor's caches."""
    lane = running[name]
    for _ in range(_COLD):
        lane.step()
    return [lane.step() for _ in range(count)]


def halfway_prompts(texts: Sequence[SampledText], batch: int) -> list[TokenizedPrompt]:
    """Returns ``batch`` prompts that include the first half of the texts."""
    prompts = [text.after(len(text.tokens) // 2) for text in texts]
    return [prompts[i % len(prompts)] for i in range(batch)]
