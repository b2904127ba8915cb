"""What a round takes: the real engine with the real proposer, in turns with plain decoding, on the same machine.

Drafting, the target's pass, the law, the verdict and the caches are all in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import median
from time import perf_counter
from typing import TypeVar

from foretoken.control.fixed import Fixed
from foretoken.core.distributions import Law
from foretoken.engine.loop import Engine
from foretoken.engine.prompts import TokenizedPrompt
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.plan.texts import SampledText, Start, contexts
from foretoken.propose.base import Proposer

PLAIN = ""
Key = TypeVar("Key")
Found = TypeVar("Found")
OPEN = 32  # sequences open at once: those of plain decoding, and of as many lanes as fit beside it
_STRETCH = 4  # rounds of one lane that are timed one after another
BESIDE = 4  # lanes between two stretches of plain decoding: a machine's speed changes within seconds
_COLD = 2  # rounds before them that are not
_WARM = 2  # rounds after the prompt's that are not timed
_SETTLING = 6  # rounds until a small model that did other work is as quick as in the midst of lanes
_READINGS = 3  # of the same prompts
_FOREVER = 1 << 30
_ids = count(1 << 40)  # of contexts; a proposer is shared by lanes and must tell them apart


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of a whole batch. rows: of the target's pass, all sequences together. Times in seconds."""

    seconds: float
    propose: float
    score: float
    rows: int


@dataclass(slots=True)
class TimedBatch:
    """A batch that goes on and on; begun anew where a sequence has reached the model's length."""

    target: Model
    proposer: Proposer
    depth: int
    prompts: Sequence[Start]
    law: Law
    prefill: float = 0.0
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = Engine(self.target, self.proposer, Fixed(self.depth), max_sequences=len(self.prompts))
        self._begin()

    def turn(self) -> Turn:
        if len(self.engine.running) < len(self.prompts):
            self._begin()
        started = perf_counter()
        steps = self.engine.step_or_raise()
        seconds = perf_counter() - started
        laps, rows = steps[0].timings, sum(len(step.draft) + 1 for step in steps)
        return Turn(seconds, laps.propose, laps.score, rows)

    def close(self) -> None:
        self.engine.clear()

    def _begin(self) -> None:
        self.close()
        for context in contexts(self.prompts, self.law, 0):
            context.id = next(_ids)
            self.engine.add(context, Length(_FOREVER))
        started = perf_counter()
        self.engine.step_or_raise()
        self.prefill = perf_counter() - started
        for _ in range(_WARM):
            if len(self.engine.running) == len(self.prompts):
                self.engine.step_or_raise()


@dataclass(frozen=True, slots=True)
class Timed:
    """The turns of one lane, and of plain decoding beside them."""

    turns: tuple[Turn, ...]
    plain: tuple[Turn, ...]


Visit = Mapping[str, Timed]
"""Lanes that were timed together."""


def timed(
    target: Model,
    lanes: Mapping[str, tuple[Proposer, int]],
    prompts: Sequence[Start],
    law: Law,
    turns: int,
    tick: Callable[[int], None] = lambda rounds: None,
) -> dict[str, Timed]:
    """Every lane (a proposer and its depth) on ``prompts`` at once, ``turns`` rounds each, some lanes at a time.

    tick: called now and then with the number of rounds timed since, plain ones not counted.
    """
    names, found = list(lanes), {}
    together = max(1, OPEN // len(prompts) - 1)
    for start in range(0, len(names), together):
        group = names[start : start + together]
        running = {PLAIN: TimedBatch(target, Proposer(), 0, prompts, law)}
        try:
            for name in group:
                running[name] = TimedBatch(target, *lanes[name], prompts, law)
            seen = _in_turns(running, turns, tick)
        finally:
            for lane in running.values():
                lane.close()
        for name in group:
            own, plain = seen[name]
            found[name] = Timed(tuple(own), tuple(plain))
    return found


def plain_pass(target: Model, prompts: Sequence[Start], law: Law) -> float:
    """Seconds of the target's pass in plain decoding of ``prompts`` at once, just now."""
    lane = TimedBatch(target, Proposer(), 0, prompts, law)
    try:
        for _ in range(_SETTLING):
            lane.turn()
        return median(lane.turn().score for _ in range(_STRETCH))
    finally:
        lane.close()


@dataclass(frozen=True, slots=True)
class PrefillTiming:
    """The round that holds a batch's prompts: seconds without speculation, and beside that by proposer."""

    seconds: float
    over_plain: Mapping[str, float]


def reading(target: Model, proposers: Mapping[str, Proposer], prompts: Sequence[Start], law: Law) -> PrefillTiming:
    """Reads ``prompts`` at once with each proposer, before anybody keeps what was computed of them."""

    def run(name: str) -> float:
        lane = TimedBatch(target, proposers.get(name) or Proposer(), 1, prompts, law)
        lane.close()
        return lane.prefill

    run(PLAIN)  # the first finds the weights where nobody has touched them yet
    seen = [each for _ in range(_READINGS) for each in beside(list(proposers), PLAIN, run)]
    ratios = defaultdict(list)
    for name, own, plain in seen:
        ratios[name].append(own / plain)
    return PrefillTiming(median(plain for *_, plain in seen), {name: median(found) for name, found in ratios.items()})


def _in_turns(
    running: Mapping[str, TimedBatch], turns: int, tick: Callable[[int], None]
) -> dict[str, tuple[list[Turn], list[Turn]]]:
    """A stretch of rounds for one lane after another, each time beginning with another; plain decoding in the
    midst of every few. -> each lane's rounds, and the plain ones beside them

    One stretch of plain rounds for all lanes would make its luck theirs.
    """
    keys = [key for key in running if key != PLAIN]
    seen: dict[str, tuple[list[Turn], list[Turn]]] = {key: ([], []) for key in keys}
    for first in range(0, turns, _STRETCH):
        count = min(_STRETCH, turns - first)
        start = first // _STRETCH % len(keys)
        for key, own, plain in beside(keys[start:] + keys[:start], PLAIN, partial(_stretch, running, count)):
            seen[key][0].extend(own)
            seen[key][1].extend(plain)
        tick(count * len(keys))
    return seen


def beside(keys: Sequence[Key], plain: Key, run: Callable[[Key], Found]) -> Iterator[tuple[Key, Found, Found]]:
    """Runs all in turn, ``plain`` in the midst of every few. -> each, what it gave, and what ``plain`` gave then"""
    for at in range(0, len(keys), BESIDE):
        near = keys[at : at + BESIDE]
        middle = len(near) // 2
        given = [run(key) for key in near[:middle]]
        base = run(plain)
        given += [run(key) for key in near[middle:]]
        yield from ((key, own, base) for key, own in zip(near, given, strict=True))


def _stretch(running: Mapping[str, TimedBatch], count: int, name: str) -> list[Turn]:
    """The first rounds are not counted: they find the caches full of another lane's weights, which is how long a small
    model's rounds never take once it runs by itself.
    """
    lane = running[name]
    for _ in range(_COLD):
        lane.turn()
    return [lane.turn() for _ in range(count)]


def midway(texts: Sequence[SampledText], batch: int) -> list[TokenizedPrompt]:
    """``batch`` prompts with half of what the target wrote after them."""
    whole = [text.after(len(text.tokens) // 2) for text in texts]
    return [whole[i % len(whole)] for i in range(batch)]
