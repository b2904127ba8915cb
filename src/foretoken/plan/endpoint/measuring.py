"""The measurement of a server: the waves that are sent, what they cost, and what makes them no basis of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.plan.endpoint.acceptance import CannotTellError
from foretoken.plan.endpoint.engines import told_depth
from foretoken.plan.endpoint.waves import MeasuredLane, Wave, WaveSender, rest_between
from foretoken.probe.answers import ServerAnswer
from foretoken.probe.side import Side
from foretoken.probe.sides import switched

LEAST, MOST = 4, 20  # waves of each lane and concurrency
USUAL = 5
_DEEPEST = 16  # draft length that is measured beside the server's own
_USUAL_DEPTH = 4
_RECURS = 0.05  # share of the bursts that are the largest, from which it is that of a whole draft
_CHARACTERS = 3.2  # of a token, about

Say = Callable[[str, float], None]
"""Reports progress: what is being done, and the share of the whole that is done."""


@dataclass(frozen=True)
class Workload:
    """What is sent.

    Attributes:
        prompts: Texts like the user's.
        concurrency: Numbers of requests at once.
        rounds: Waves of every lane at each of these numbers.
    """

    prompts: Sequence[str]
    concurrency: Sequence[int]
    rounds: int

    def wave(self, number: int, concurrency: int) -> list[str]:
        """Returns the prompts of one round, the same for all lanes."""
        first = number * concurrency
        return [self.prompts[(first + i) % len(self.prompts)] for i in range(concurrency)]

    def costs(self, lanes: int, max_tokens: int, seconds: float) -> dict[str, Any]:
        """Returns what it takes.

        Args:
            lanes: Number of lanes.
            max_tokens: Of every answer.
            seconds: Of one round, about.
        """
        requests = lanes * self.rounds * sum(self.concurrency)
        characters = sum(map(len, self.prompts)) / len(self.prompts)
        return {
            "requests": requests,
            "prompt_tokens": round(requests * characters / _CHARACTERS),
            "tokens": requests * max_tokens,
            "minutes": round(seconds * self.rounds / 60.0, 1),
            "waves": lanes * self.rounds * len(self.concurrency),
            "rounds": self.rounds,
            "concurrency": list(self.concurrency),
        }


@dataclass
class Measured:
    """Waves by lane and concurrency, and why some concurrencies have none."""

    lanes: Sequence[MeasuredLane]
    waves: dict[tuple[int, int], list[Wave]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def of(self, lane: int) -> list[Wave]:
        """Returns all waves of a lane."""
        return [wave for (own, _), waves in self.waves.items() if own == lane for wave in waves]

    @property
    def concurrency(self) -> list[int]:
        """Numbers of requests at once that were measured with every lane."""
        return sorted({number for _, number in self.waves})

    def drop(self, concurrency: int, why: str) -> None:
        """Leaves a number of requests at once out."""
        self.waves = {key: waves for key, waves in self.waves.items() if key[1] != concurrency}
        self.notes.append(f"nothing is told about {concurrency} requests at once, because {why}")


def own_depth(side: Side, waves: Sequence[Wave]) -> int:
    """Returns the draft length of a server, from what it says or from the largest burst.

    Raises:
        CannotTellError: Nothing was drafted.
    """
    told = told_depth(side.dialect.kind, side.client)
    counts = [each for wave in waves for each in (wave.counted, wave.counts) if each is not None]
    if told is None and counts:
        told = max(len(each.by_position) for each in counts) or None
        steps = sum(each.steps or 0.0 for each in counts)
        if told is None and steps:
            told = round(sum(each.drafted for each in counts) / steps) or None
        if not sum(each.drafted for each in counts):
            raise CannotTellError("the server drafted nothing: there is no speculation to plan")
    if told is None:
        told = _largest([size for wave in waves for stream in wave.streams for size in stream.bursts]) - 1
    if told < 1:
        raise CannotTellError("the server does not say how many tokens it drafts; name its draft length with --depth")
    return told


def _largest(bursts: Sequence[float]) -> int:
    """Returns the tokens of a fully accepted draft's burst, 0 if none recurs often enough to be one.

    Where few drafts are accepted to their end, the largest burst is only a lower bound.
    """
    sizes = sorted(max(1, round(size)) for size in bursts)
    if not sizes:
        return 0
    often, largest = Counter(sizes), sizes[-1 - len(sizes) // 50]
    return largest if often[largest] >= max(2.0, _RECURS * len(sizes)) and often[largest] > often[largest - 1] else 0


def lanes_of(plain: Side, speculative: Side, depth: int) -> list[MeasuredLane]:
    """Returns the lanes: plain, the server's own draft length, and another where a request can choose it."""
    lanes, name = [MeasuredLane(plain, 0)], speculative.dialect.depth
    if not name:
        return [*lanes, MeasuredLane(speculative, depth)]
    other = 2 * depth if 2 * depth <= min(_DEEPEST, 2 * _USUAL_DEPTH) else max(1, depth // 2)
    chosen = sorted({depth, other})
    return [*lanes, *(MeasuredLane(switched(speculative, {name: own}, f"speculative {own}"), own) for own in chosen)]


def warmed(sender: WaveSender, lanes: Sequence[MeasuredLane], prompts: Sequence[str], largest: int) -> float:
    """Sends a small and a large wave to every lane. Returns the seconds that one round of both sizes takes.

    Raises:
        CannotTellError: A wave fails.
    """
    addresses = [lane.side.client.url for lane in lanes]
    seconds = sum(rest_between(*each) for each in pairwise(addresses))
    for lane in lanes:
        for size in dict.fromkeys((1, largest)):
            sent = [prompts[i % len(prompts)] for i in range(size)]
            wave = sender.send(lane.side, sent, f"warm-up/{size}")
            if not isinstance(wave, Wave):
                raise CannotTellError(f"{lane.side.name} requests fail, {size} at once: {wave.why}", later=True)
            seconds += max(answer.began + answer.seconds for answer in wave.answers) / (1 if largest == 1 else 2)
    return seconds


def rounds_of(budget: int | None, seconds: float | None, tokens_a_round: int, seconds_a_round: float) -> int:
    """Returns the number of rounds for a budget in tokens or seconds. Raises InvalidRequest if it is too small."""
    if budget is None and seconds is None:
        return USUAL
    if budget is not None:
        rounds, needs = budget // tokens_a_round, f"{LEAST * tokens_a_round:,} tokens"
    else:
        rounds, needs = int((seconds or 0.0) / seconds_a_round), f"about {LEAST * seconds_a_round:,.0f} s"
    if rounds < LEAST:
        raise InvalidRequest(
            f"--budget is too small: a plan takes {needs} at this --concurrency and --max-tokens; give more, or lower "
            "these"
        )
    return min(rounds, MOST)


def measure(sender: WaveSender, lanes: Sequence[MeasuredLane], work: Workload, say: Say) -> Measured:
    """Sends all waves, the lanes in turn, so that a machine that slows down slows all of them.

    Raises:
        CannotTellError: No number of requests at once could be measured.
    """
    result, total, done = Measured(lanes), work.rounds * len(lanes) * len(work.concurrency), 0
    left = list(work.concurrency)
    for number in range(work.rounds):
        for place, concurrency in enumerate(list(left)):
            for turn in range(len(lanes)):
                at = (turn + number + place) % len(lanes)  # two lanes change places, so that each goes on where it was
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
    _checked(result)
    return result


def _checked(measured: Measured) -> None:
    """Leaves out what says nothing. Raises CannotTellError if nothing is left, or the whole is no basis."""
    if any(not wave.tokens for waves in measured.waves.values() for wave in waves):
        raise CannotTellError("the server does not say how many tokens it generates: its streams have no usage")
    for concurrency in measured.concurrency:
        cells = [measured.waves.get((at, concurrency), []) for at in range(len(measured.lanes))]
        if any(sum(bool(wave.streams) for wave in waves) < 2 for waves in cells):
            why = "the server does not decode so many at once, or texts are too short; see --max-tokens"
            measured.drop(concurrency, why)
    if not measured.waves:
        raise CannotTellError("; ".join(measured.notes) or "nothing was measured", later=True)
    if any(wave.foreign for waves in measured.waves.values() for wave in waves):
        raise CannotTellError("the server generated tokens for other requests meanwhile; leave it alone and run again")
    for wave in measured.of(0):
        if wave.counts is not None and wave.counts.drafted > 0:
            raise CannotTellError(
                "the plain side drafted tokens: it is not plain; give a server without speculation as --baseline"
            )


def plain_answers(measured: Measured, work: Workload) -> tuple[list[ServerAnswer], list[str]]:
    """Returns the answers without speculation, with their prompts."""
    answers: list[ServerAnswer] = []
    prompts: list[str] = []
    for (lane, concurrency), waves in measured.waves.items():
        if lane == 0:
            for number, wave in enumerate(waves):
                answers += wave.answers
                prompts += work.wave(number, concurrency)
    return answers, prompts


def options_of(temperature: float) -> Mapping[str, Any]:
    """Returns the sampling parameters of every request."""
    return {"temperature": temperature}
