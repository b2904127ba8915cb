"""The measurement of a server: plain and speculative waves in turn, their costs, and the conditions of their use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.probe.answers import ServerAnswer
from foretoken.probe.dialects import reported_depth
from foretoken.probe.side import CHARACTERS, Side
from foretoken.probe.waves import Wave, WaveSender, rest_between

MIN_ROUNDS, ROUNDS, MAX_ROUNDS = 4, 5, 20  # waves of each lane and concurrency: least, without a budget, most
_DEEPEST = 8  # draft length that is measured beside the server's own
_RECURS = 0.05  # fraction of the bursts that have the largest size, from which it is that of a fully accepted draft

Say = Callable[[str, float], None]
"""Reports progress: the current stage, and the finished fraction of the whole."""


class CannotTellError(Exception):
    """The measurements do not support a plan. later: whether the same run may, when the server answers again."""

    def __init__(self, why: str, later: bool = False) -> None:
        super().__init__(why)
        self.later = later


@dataclass(frozen=True)
class MeasuredLane:
    """A way to decode that is measured. depth: draft length, 0 for plain decoding."""

    side: Side
    depth: int


@dataclass(frozen=True)
class Workload:
    """The requests of a measurement. rounds: waves of every lane at each number of requests at once."""

    prompts: Sequence[str]
    concurrency: Sequence[int]
    rounds: int

    def wave(self, number: int, concurrency: int) -> list[str]:
        """Returns the prompts of one round, the same for all lanes."""
        return cycled(self.prompts, concurrency, number * concurrency)

    def costs(self, lanes: int, max_tokens: int, seconds: float) -> dict[str, Any]:
        """Returns requests, tokens and minutes. max_tokens: of every answer. seconds: of one round, about."""
        requests = lanes * self.rounds * sum(self.concurrency)
        characters = sum(map(len, self.prompts)) / len(self.prompts)
        return {
            "requests": requests,
            "prompt_tokens": round(requests * characters / CHARACTERS),
            "tokens": requests * max_tokens,
            "minutes": round(seconds * self.rounds / 60.0, 1),
            "waves": lanes * self.rounds * len(self.concurrency),
            "rounds": self.rounds,
            "concurrency": list(self.concurrency),
        }


def cycled(prompts: Sequence[str], count: int, first: int = 0) -> list[str]:
    """Returns ``count`` prompts from the ``first`` on, several times if there are fewer."""
    return [prompts[(first + i) % len(prompts)] for i in range(count)]


@dataclass
class Measured:
    """Waves by lane and concurrency, and notes on concurrencies without any."""

    lanes: Sequence[MeasuredLane]
    waves: dict[tuple[int, int], list[Wave]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def of(self, lane: int) -> list[Wave]:
        """Returns all waves of a lane."""
        return [wave for (number, _), waves in self.waves.items() if number == lane for wave in waves]

    @property
    def concurrency(self) -> list[int]:
        """Numbers of requests at once that were measured with every lane."""
        return sorted({number for _, number in self.waves})

    def drop(self, concurrency: int, why: str) -> None:
        """Removes the waves of a concurrency."""
        self.waves = {key: waves for key, waves in self.waves.items() if key[1] != concurrency}
        self.notes.append(f"nothing is told about {concurrency} requests at once, because {why}")

    def plain_answers(self, work: Workload) -> tuple[list[ServerAnswer], list[str]]:
        """Returns the answers without speculation, with their prompts."""
        answers: list[ServerAnswer] = []
        prompts: list[str] = []
        for (lane, concurrency), waves in self.waves.items():
            for number, wave in enumerate(waves if lane == 0 else ()):
                answers += wave.answers
                prompts += work.wave(number, concurrency)
        return answers, prompts

    def check(self) -> None:
        """Drops concurrencies without full waves. Raises CannotTellError if no waves are left, or some are invalid."""
        every = [wave for waves in self.waves.values() for wave in waves]
        if any(not wave.tokens for wave in every):
            raise CannotTellError("the server does not say how many tokens it generates: its streams have no usage")
        for concurrency in self.concurrency:
            cells = [self.waves.get((at, concurrency), []) for at in range(len(self.lanes))]
            if any(sum(bool(wave.streams) for wave in waves) < 2 for waves in cells):
                why = "the server does not decode so many at once, or texts are too short; see --max-tokens"
                self.drop(concurrency, why)
        if not self.waves:
            raise CannotTellError("; ".join(self.notes) or "nothing was measured", later=True)
        if any(wave.foreign for waves in self.waves.values() for wave in waves):
            raise CannotTellError(
                "the server generated tokens for other requests meanwhile; leave it alone and run again"
            )
        if any(wave.counts is not None and wave.counts.drafted > 0 for wave in self.of(0)):
            raise CannotTellError(
                "the plain side drafted tokens: it is not plain; give a server without speculation as --baseline"
            )


def draft_length(side: Side, waves: Sequence[Wave]) -> int:
    """Returns the draft length of a server, from its report, its counts or the largest burst.

    Raises:
        CannotTellError: Nothing was drafted.
    """
    depth = reported_depth(side.dialect.kind, side.client)
    counts = [each for wave in waves for each in (wave.counted, wave.counts) if each is not None]
    if depth is None and counts:
        depth = max(len(each.by_position) for each in counts) or None
        steps = sum(each.steps or 0.0 for each in counts)
        if depth is None and steps:
            depth = round(sum(each.drafted for each in counts) / steps) or None
        if not sum(each.drafted for each in counts):
            raise CannotTellError("the server drafted nothing: there is no speculation to plan")
    if depth is None:
        depth = _largest([size for wave in waves for stream in wave.streams for size in stream.bursts]) - 1
    if depth < 1:
        raise CannotTellError("the server does not say how many tokens it drafts; name its draft length with --depth")
    return depth


def _largest(bursts: Sequence[float]) -> int:
    """Returns the tokens of a fully accepted draft's burst, 0 if no large burst recurs often enough to be one.

    If few drafts are accepted to their end, the largest burst is only a lower bound.
    """
    sizes = sorted(max(1, round(size)) for size in bursts)
    if not sizes:
        return 0
    often, largest = Counter(sizes), sizes[-1 - len(sizes) // 50]
    return largest if often[largest] >= max(2.0, _RECURS * len(sizes)) and often[largest] > often[largest - 1] else 0


def lanes_of(plain: Side, speculative: Side, depth: int) -> list[MeasuredLane]:
    """Returns the lanes: plain, the server's own draft length, and another if a request can choose it."""
    lanes, name = [MeasuredLane(plain, 0)], speculative.dialect.depth
    if not name:
        return [*lanes, MeasuredLane(speculative, depth)]
    other = 2 * depth if 2 * depth <= _DEEPEST else max(1, depth // 2)
    for chosen in sorted({depth, other}):
        side = replace(speculative, name=f"speculative {chosen}", switch={name: chosen})
        lanes.append(MeasuredLane(side, chosen))
    return lanes


def warmed(sender: WaveSender, lanes: Sequence[MeasuredLane], prompts: Sequence[str], largest: int) -> float:
    """Sends a small and a large wave to every lane. Returns the seconds that one round of both sizes takes.

    Raises:
        CannotTellError: A wave fails.
    """
    seconds = sum(rest_between(*urls) for urls in pairwise(lane.side.client.url for lane in lanes))
    for lane in lanes:
        for size in dict.fromkeys((1, largest)):
            wave = sender.send(lane.side, cycled(prompts, size), f"warm-up/{size}")
            if not isinstance(wave, Wave):
                raise CannotTellError(f"{lane.side.name} requests fail, {size} at once: {wave.why}", later=True)
            seconds += max(answer.began + answer.seconds for answer in wave.answers) / (1 if largest == 1 else 2)
    return seconds


def rounds_of(budget: int | None, seconds: float | None, round_tokens: int, round_seconds: float) -> int:
    """Returns the number of rounds for a budget in tokens or seconds. Raises InvalidRequest if it is too small."""
    if budget is None and seconds is None:
        return ROUNDS
    if budget is not None:
        rounds, needs = budget // round_tokens, f"{MIN_ROUNDS * round_tokens:,} tokens"
    else:
        rounds, needs = int((seconds or 0.0) / round_seconds), f"about {MIN_ROUNDS * round_seconds:,.0f} s"
    if rounds < MIN_ROUNDS:
        raise InvalidRequest(
            f"--budget is too small: a plan takes {needs} at this --concurrency and --max-tokens; give more, or lower "
            "these"
        )
    return min(rounds, MAX_ROUNDS)


def measure(sender: WaveSender, lanes: Sequence[MeasuredLane], work: Workload, say: Say) -> Measured:
    """Sends all waves, the lanes in turn, so that a machine that slows down slows all of them.

    Raises:
        CannotTellError: No concurrency could be measured, or the waves do not support a plan.
    """
    result, total, done = Measured(lanes), work.rounds * len(lanes) * len(work.concurrency), 0
    left = list(work.concurrency)
    for number in range(work.rounds):
        for index, concurrency in enumerate(list(left)):
            for turn in range(len(lanes)):
                at = (turn + number + index) % len(lanes)  # a round begins with the lane that ended the last one
                say(f"{concurrency} at once, {lanes[at].side.name}", done / total)
                done += 1
                prompts = work.wave(number, concurrency)
                wave = sender.send(lanes[at].side, prompts, f"round {number}/{concurrency}/{at}")
                if isinstance(wave, Wave):
                    result.waves.setdefault((at, concurrency), []).append(wave)
                    continue
                result.drop(concurrency, f"requests failed: {wave.why}")
                left.remove(concurrency)
                break
    result.check()
    return result
