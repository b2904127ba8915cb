"""The measurement of a server: plain and speculative waves of requests in turn, and the conditions of their use.

A wave is sent at once. Its window begins when its last stream has its first token, and ends when its first stream ends.
Every pass inside it decodes all sequences, so that the measured time includes no prompt and no smaller batch.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from foretoken.core.errors import InvalidRequest
from foretoken.core.progress import Say
from foretoken.probe.answers import DraftCounts, Failed, Refused, ServerAnswer, ServerCounters, summed
from foretoken.probe.client import Ask, EndpointClient, Journal, request_key
from foretoken.probe.server import CHARACTERS, CannotTellError, EndpointRequest, Side, reported_depth, sent

_JUMP = 3.0  # ratio of two gaps, next to each other in size, that separates passes from tokens of one pass
_PASSES, _SHARE = 3, 0.08  # gaps between passes, at least, and their fraction: fewer are stalls
_FOREIGN = 1.2  # ratio of the server's tokens to ours from which others use it too
_DISTURBED = 3.0  # a pass that takes this many times the median was disturbed
_MIN_TOKENS = 4  # of a stream inside a window
_REST = 1.1  # seconds until processes that have decoded wait without using a core; vLLM's take one
_MIN_ROUNDS, _ROUNDS, _MAX_ROUNDS = 4, 5, 20  # waves of each side and concurrency: least, without a budget, most
_DEEPEST = 8  # draft length that is measured beside the server's own
_RECURS = 0.05  # fraction of the bursts that have the largest size, from which it is that of a fully accepted draft


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """A stream inside a wave's window. bursts: tokens of each arrival after the first."""

    seconds: float  # of its passes, without disturbed ones
    tokens: float  # of these passes
    passes: int
    bursts: tuple[float, ...]


@dataclass(frozen=True)
class Wave:
    """Answers to requests that were sent at once, and the server's metrics meanwhile, None if it has none."""

    answers: tuple[ServerAnswer, ...]
    counted: DraftCounts | None = None
    generated: float | None = None  # tokens of all users

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def counts(self) -> DraftCounts | None:
        """Draft tokens by the answers, else by the metrics, None if neither has them."""
        return summed(answer.counts for answer in self.answers) or self.counted

    @property
    def foreign(self) -> bool:
        """Whether the server's metrics counted tokens of other requests."""
        return self.generated is not None and self.generated > _FOREIGN * self.tokens + 2 * len(self.answers)

    @cached_property
    def streams(self) -> tuple[StreamTimes, ...]:
        """The streams inside the window, none if at no time all were decoded."""
        if not self.answers or not all(answer.arrivals for answer in self.answers):
            return ()
        start = max(answer.began + answer.arrivals[0].seconds for answer in self.answers)
        end = min(answer.began + answer.arrivals[-1].seconds for answer in self.answers)
        streams = [_stream(answer, start - answer.began, end - answer.began) for answer in self.answers]
        return tuple(each for each in streams if each is not None) if all(streams) else ()


def _stream(answer: ServerAnswer, start: float, end: float) -> StreamTimes | None:
    """Returns a stream between two times, in seconds since its request, None if too little of it lies there."""
    characters = max(1, sum(arrival.characters for arrival in answer.arrivals))
    inside = [arrival for arrival in answer.arrivals if start - 1e-6 <= arrival.seconds <= end + 1e-6]
    if len(inside) < 2:
        return None
    gaps = [after.seconds - before.seconds for before, after in pairwise(inside)]
    one_per_pass = any(arrival.tokens for arrival in inside)  # servers that count tokens send a chunk for every pass
    limit = -1.0 if one_per_pass else _separation(gaps)
    sizes = [float(each.tokens or answer.tokens * each.characters / characters) for each in inside]
    bursts, begins = [sizes[0]], [inside[0].seconds]
    for arrival, size, gap in zip(inside[1:], sizes[1:], gaps, strict=True):
        if gap > limit:
            bursts.append(0.0)
            begins.append(arrival.seconds)
        bursts[-1] += size
    passes = list(zip((after - before for before, after in pairwise(begins)), bursts[1:], strict=True))
    if len(passes) < 2 or sum(bursts[1:]) < _MIN_TOKENS:
        return None
    longest = _DISTURBED * median(gap for gap, _ in passes)
    kept = [(gap, size) for gap, size in passes if gap <= longest]
    seconds, tokens = map(sum, zip(*kept, strict=True))
    return StreamTimes(seconds, tokens, len(kept), tuple(bursts[1:])) if seconds > 0.0 else None


def _separation(gaps: Sequence[float]) -> float:
    """Returns the longest gap between chunks of one pass, negative if every chunk is a pass.

    Tokens of one pass arrive within a fraction of its time. Gaps then have two sizes, with nothing between them.
    """
    ordered = sorted(max(gap, 1e-6) for gap in gaps)
    last = len(ordered) - max(_PASSES, round(_SHARE * len(ordered)))
    ratio, at = max(((ordered[i] / ordered[i - 1], i) for i in range(1, last + 1)), default=(0.0, 0))
    return -1.0 if ratio < _JUMP else float((ordered[at - 1] * ordered[at]) ** 0.5)


def rest_between(one: str, other: str) -> float:
    """Returns the seconds to wait between waves to two servers: on one host they may share processors."""
    return _REST if one != other and urlsplit(one).hostname == urlsplit(other).hostname else 0.0


@dataclass
class WaveSender:
    """Sends waves, again if one of their requests fails."""

    journal: Journal[Wave]  # waves of earlier runs
    max_tokens: int
    temperature: float
    retries: int = 4
    pause: float = 1.0  # seconds before the first retry; it doubles with each
    _decoded: str = field(default="", init=False)  # the server that decoded last

    def send(self, side: Side, prompts: Sequence[str], tag: str) -> Wave | Refused | Failed:
        """Returns the wave of these prompts. tag: distinguishes equal waves."""
        bodies = [self._body(side, prompt) for prompt in prompts]
        key = request_key(f"{side.client.url}/{side.name}", tag, {"wave": bodies})
        if (earlier := self.journal.get(key)) is not None:
            return earlier
        result = self._once(side, bodies, f"{tag}/0")
        for number in range(self.retries):
            if not isinstance(result, Failed):
                break
            time.sleep(min(30.0, self.pause * 2.0**number))
            result = self._once(side, bodies, f"{tag}/{number + 1}")
        if isinstance(result, Wave):
            self.journal.keep(key, result)
        return result

    def _once(self, side: Side, bodies: Sequence[Mapping[str, Any]], tag: str) -> Wave | Refused | Failed:
        patience = replace(side.client.patience, retries=0)  # a request that is tried again alone is not in the wave
        client = EndpointClient(side.client.url, side.client.key, patience, spent=side.client.spent)
        time.sleep(rest_between(self._decoded or client.url, client.url))
        self._decoded = client.url
        before = ServerCounters.of(client.get("/metrics"))
        asks = [Ask(body, f"{tag}/{i}") for i, body in enumerate(bodies)]
        replies = client.post(side.path, asks, len(asks))
        side.client.tick()
        answers = [reply for reply in replies if isinstance(reply, ServerAnswer)]
        if len(answers) < len(replies):
            return next(reply for reply in replies if not isinstance(reply, ServerAnswer))
        after = ServerCounters.of(client.get("/metrics"))
        began = min(answer.began for answer in answers)
        counted = after.since(before, float(sum(answer.tokens - 1 for answer in answers)))
        generated = None
        if before.generated is not None and after.generated is not None:
            generated = after.generated - before.generated
        return Wave(tuple(replace(answer, began=answer.began - began) for answer in answers), counted, generated)

    def _body(self, side: Side, prompt: str) -> Mapping[str, Any]:
        request = EndpointRequest(prompt, self.max_tokens, "", self.temperature, top=False, continued=False)
        return side.body(request) | {"stream": True, "stream_options": {"include_usage": True}}


def sides_of(plain: Side, speculative: Side, depth: int) -> list[Side]:
    """Returns the sides to measure: plain, the server's own draft length, and another if a request can choose it."""
    name, depths = speculative.dialect.depth, {depth}
    if not name:
        return [plain, replace(speculative, depth=depth)]
    depths.add(2 * depth if 2 * depth <= _DEEPEST else max(1, depth // 2))
    return [plain, *(replace(speculative, name=f"speculative {n}", switch={name: n}, depth=n) for n in sorted(depths))]


@dataclass
class Measurement:
    """Waves of a server by draft length (0 is plain) and concurrency, and notes on concurrencies without any."""

    sender: WaveSender
    sides: Sequence[Side]
    prompts: Sequence[str]
    concurrency: Sequence[int]  # numbers of requests at once
    waves: dict[tuple[int, int], list[Wave]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def prompts_of(self, number: int, concurrency: int) -> list[str]:
        """Returns the prompts of one round, the same for all sides. They are cycled."""
        first = number * concurrency
        return [self.prompts[(first + i) % len(self.prompts)] for i in range(concurrency)]

    def warm_up(self) -> float:
        """Sends a small and a large wave to every side. Returns the seconds of a round. Raises CannotTellError."""
        largest, sides = max(self.concurrency), self.sides
        seconds = sum(rest_between(*urls) for urls in pairwise(side.client.url for side in sides))
        for side in sides:
            for size in dict.fromkeys((1, largest)):
                wave = self.sender.send(side, self.prompts_of(0, size), f"warm-up/{size}")
                if not isinstance(wave, Wave):
                    raise CannotTellError(f"{side.name} requests fail, {size} at once: {wave.why}", later=True)
                seconds += max(answer.began + answer.seconds for answer in wave.answers) / (1 if largest == 1 else 2)
        return seconds * len(self.concurrency)

    @property
    def round_tokens(self) -> int:
        return len(self.sides) * sum(self.concurrency) * self.sender.max_tokens

    def rounds(self, budget: int | None, seconds: float | None, round_seconds: float) -> int:
        """Returns the number of rounds for a budget in tokens or seconds. Raises InvalidRequest if it is too small."""
        if budget is not None:
            rounds, needs = budget // self.round_tokens, f"{_MIN_ROUNDS * self.round_tokens:,} tokens"
        elif seconds is not None:
            rounds, needs = int(seconds / round_seconds), f"about {_MIN_ROUNDS * round_seconds:,.0f} s"
        else:
            return _ROUNDS
        if rounds < _MIN_ROUNDS:
            settings = "at this --concurrency and --max-tokens; give more, or lower these"
            raise InvalidRequest(f"--budget is too small: a plan takes {needs} {settings}")
        return min(rounds, _MAX_ROUNDS)

    def costs(self, rounds: int, round_seconds: float) -> dict[str, Any]:
        """Returns estimated requests, tokens and minutes of ``rounds`` rounds."""
        requests = len(self.sides) * rounds * sum(self.concurrency)
        characters = sum(map(len, self.prompts)) / len(self.prompts)
        return {
            "requests": requests,
            "prompt_tokens": round(requests * characters / CHARACTERS),
            "tokens": rounds * self.round_tokens,
            "minutes": round(round_seconds * rounds / 60.0, 1),
            "waves": len(self.sides) * rounds * len(self.concurrency),
            "rounds": rounds,
            "concurrency": list(self.concurrency),
            "sent": sent(self.sides),
        }

    def run(self, rounds: int, say: Say) -> None:
        """Sends all waves, the sides in turn, so that a machine that slows down slows all of them.

        Raises CannotTellError if no concurrency could be measured, or the waves do not support a plan.
        """
        sides, left, done = self.sides, list(self.concurrency), 0
        for number in range(rounds):
            for index, concurrency in enumerate(list(left)):
                for turn in range(len(sides)):
                    at = (turn + number + index) % len(sides)  # a round begins with the side that ended the last one
                    total = rounds * len(sides) * len(self.concurrency)
                    say(f"{concurrency} at once, {sides[at].name}", done / total)
                    done += 1
                    prompts = self.prompts_of(number, concurrency)
                    wave = self.sender.send(sides[at], prompts, f"round {number}/{concurrency}/{at}")
                    if not isinstance(wave, Wave):
                        self._drop(concurrency, f"requests failed: {wave.why}")
                        left.remove(concurrency)
                        break
                    self.waves.setdefault((sides[at].depth, concurrency), []).append(wave)
        self._check()

    def of(self, depth: int) -> list[Wave]:
        """Returns all waves of a draft length."""
        return [wave for (each, _), waves in self.waves.items() if each == depth for wave in waves]

    @property
    def measured(self) -> list[int]:
        """Numbers of requests at once that were measured with every side."""
        return sorted({number for _, number in self.waves})

    @property
    def plain_answers(self) -> tuple[list[ServerAnswer], list[str]]:
        """The answers without speculation, with their prompts."""
        answers: list[ServerAnswer] = []
        prompts: list[str] = []
        for (depth, concurrency), waves in self.waves.items():
            for number, wave in enumerate(waves if depth == 0 else ()):
                answers += wave.answers
                prompts += self.prompts_of(number, concurrency)
        return answers, prompts

    def _drop(self, concurrency: int, why: str) -> None:
        self.waves = {key: waves for key, waves in self.waves.items() if key[1] != concurrency}
        self.notes.append(f"{concurrency} requests at once are skipped, because {why}")

    def _check(self) -> None:
        """Drops concurrencies without full waves. Raises CannotTellError if no waves are left, or some are invalid."""
        if any(not wave.tokens for waves in self.waves.values() for wave in waves):
            raise CannotTellError("the server does not say how many tokens it generates: its streams have no usage")
        for concurrency in self.measured:
            cells = [self.waves.get((side.depth, concurrency), []) for side in self.sides]
            if any(sum(bool(wave.streams) for wave in waves) < 2 for waves in cells):
                why = "the server does not decode all of them at once, or texts are too short; see --max-tokens"
                self._drop(concurrency, why)
        if not self.waves:
            raise CannotTellError("; ".join(self.notes) or "nothing was measured", later=True)
        if any(wave.foreign for waves in self.waves.values() for wave in waves):
            why = "the server generated tokens for other requests meanwhile; leave it alone and run again"
            raise CannotTellError(why)
        if any(wave.counts is not None and wave.counts.drafted > 0 for wave in self.of(0)):
            why = "the plain side drafted tokens: it is not plain; give a server without speculation as --baseline"
            raise CannotTellError(why)


def draft_length(side: Side, waves: Sequence[Wave]) -> int:
    """Returns the draft length of a server by its report, its counts or the largest burst. Raises CannotTellError."""
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
