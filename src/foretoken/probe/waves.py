"""Waves: requests that are sent at once, and the speed of their streams while all of them are being decoded.

A wave's window begins when its last stream has its first token, and ends when its first stream ends. Every pass inside
it decodes all sequences, so that the measured time includes no prompt and no smaller batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from foretoken.probe.answers import Failed, Refused, ServerAnswer
from foretoken.probe.client import Ask, EndpointClient, Journal, request_key
from foretoken.probe.counters import DraftCounts, ServerCounters, summed
from foretoken.probe.side import EndpointRequest, Side

_JUMP = 3.0  # ratio of two gaps, next to each other in size, that separates passes from tokens of one pass
_PASSES, _SHARE = 3, 0.08  # gaps between passes, at least, and their fraction: fewer are stalls
_FOREIGN = 1.2  # ratio of the server's tokens to ours from which others use it too
_DISTURBED = 3.0  # a pass that takes this many times the median was disturbed
_MIN_TOKENS = 4  # of a stream inside a window
_REST = 1.1  # seconds until processes that have decoded wait without using a core; vLLM's take one


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """A stream inside a wave's window. bursts: tokens of each arrival after the first."""

    seconds: float  # of its passes, without disturbed ones
    tokens: float  # of these passes
    passes: int
    bursts: tuple[float, ...]


@dataclass(frozen=True)
class Wave:
    """Answers to requests that were sent at once.

    Attributes:
        answers: One for each request.
        counted: Draft tokens by the server's metrics meanwhile, None if they have none.
        generated: Tokens of all users by the server's metrics meanwhile, None if they have none.
    """

    answers: tuple[ServerAnswer, ...]
    counted: DraftCounts | None = None
    generated: float | None = None

    @property
    def tokens(self) -> int:
        """Generated tokens of all answers."""
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
    """Sends waves, again if one of their requests fails.

    Attributes:
        journal: Waves of earlier runs.
        max_tokens: Tokens of every answer.
        temperature: Sampling temperature.
        retries: Further tries of a wave.
        pause: Seconds before the first of them; it doubles with each.
    """

    journal: Journal[Wave]
    max_tokens: int
    temperature: float
    retries: int = 4
    pause: float = 1.0
    _decoded: str = field(default="", init=False)  # the server that decoded last

    def send(self, side: Side, prompts: Sequence[str], tag: str) -> Wave | Refused | Failed:
        """Returns the wave of these prompts. tag: distinguishes equal waves."""
        bodies = [self._body(side, prompt) for prompt in prompts]
        key = request_key(f"{side.client.url}/{side.name}", tag, {"wave": bodies})
        if (earlier := self.journal.get(key)) is not None:
            return earlier
        result: Wave | Refused | Failed = Failed("nothing was sent")
        for number in range(self.retries + 1):
            if number:
                time.sleep(min(30.0, self.pause * 2.0 ** (number - 1)))
            result = self._once(side, bodies, f"{tag}/{number}")
            if isinstance(result, Wave):
                self.journal.keep(key, result)
            if not isinstance(result, Failed):
                break
        return result

    def _once(self, side: Side, bodies: Sequence[Mapping[str, Any]], tag: str) -> Wave | Refused | Failed:
        patience = replace(side.client.patience, retries=0)  # a request that is tried again alone is not in the wave
        client = EndpointClient(side.client.url, side.client.key, patience, spent=side.client.spent)
        time.sleep(rest_between(self._decoded or client.url, client.url))
        self._decoded = client.url
        before = ServerCounters.of(client.get("/metrics"))
        asks = [Ask(body, f"{tag}/{i}") for i, body in enumerate(bodies)]
        replies = client.post(side.abilities.path, asks, len(asks))
        side.client.tick()
        answers = [reply for reply in replies if isinstance(reply, ServerAnswer)]
        if len(answers) < len(replies):
            return next(reply for reply in replies if not isinstance(reply, ServerAnswer))
        after = ServerCounters.of(client.get("/metrics"))
        began = min(answer.began for answer in answers)
        counted = after.since(before, float(sum(answer.tokens - 1 for answer in answers)))
        known = before.generated is not None and after.generated is not None
        generated = (after.generated or 0.0) - (before.generated or 0.0) if known else None
        return Wave(tuple(replace(answer, began=answer.began - began) for answer in answers), counted, generated)

    def _body(self, side: Side, prompt: str) -> Mapping[str, Any]:
        request = EndpointRequest(prompt, self.max_tokens, "", self.temperature, top=False, continued=False)
        return side.body(request) | {"stream": True, "stream_options": {"include_usage": True}}
