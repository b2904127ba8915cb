"""Waves: requests that are sent at once, and the speed of the streams while all of them are being decoded.

A wave's window begins when its last stream has its first token, and ends when its first stream ends. Inside it every
pass decodes all sequences, so no prompt and no emptier pass is in the measured time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from foretoken.probe.answers import Failed, Refused, ServerAnswer
from foretoken.probe.client import Ask, EndpointClient
from foretoken.probe.counters import DraftCounts, ServerCounters
from foretoken.probe.journal import Journal, request_key, restored_answer
from foretoken.probe.side import EndpointRequest, Side

_JUMP = 3.0  # ratio of two gaps, next to each other in size, that separates passes from tokens of one pass
_PASSES, _SHARE = 3, 0.08  # gaps between passes, at least, and their share: fewer are stalls
_FOREIGN = 1.2  # tokens that the server counted, over ours, from which others use it too
_DISTURBED = 3.0  # a pass that takes this many times the median was disturbed
LEAST_TOKENS = 4  # tokens of a stream inside a window
_REST = 1.1  # seconds until processes that have decoded wait without using a core, vLLM's take one


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """A stream inside a wave's window.

    Attributes:
        seconds: Of its passes there, without those that were disturbed.
        tokens: Tokens of these passes.
        passes: Number of these passes.
        bursts: Tokens that arrived together, one number for every arrival after the first.
    """

    seconds: float
    tokens: float
    passes: int
    bursts: tuple[float, ...]


@dataclass(frozen=True)
class Wave:
    """Answers to requests that were sent at once.

    Attributes:
        answers: One for each request.
        counted: What the server's metrics counted meanwhile, None if they do not tell.
        generated: Tokens that the server generated meanwhile for everybody, None if its metrics do not tell.
    """

    answers: tuple[ServerAnswer, ...]
    counted: DraftCounts | None = None
    generated: float | None = None

    @classmethod
    def restored(cls, given: Mapping[str, Any]) -> Wave:
        """Returns a wave from its JSON."""
        counts = given["counted"]
        counted = None if counts is None else DraftCounts(**counts | {"by_position": tuple(counts["by_position"])})
        return cls(tuple(map(restored_answer, given["answers"])), counted, given["generated"])

    @property
    def tokens(self) -> int:
        """Generated tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def counts(self) -> DraftCounts | None:
        """What the answers say about drafts, else what the metrics counted, None if neither tells."""
        own = [answer.counts for answer in self.answers]
        if all(each is not None for each in own):
            total = DraftCounts(0.0, 0.0, 0.0)
            for each in own:
                total = total if each is None else total.plus(each)
            return total
        return self.counted

    @property
    def foreign(self) -> bool:
        """Whether the server's metrics counted tokens of other requests."""
        return self.generated is not None and self.generated > _FOREIGN * self.tokens + 2 * len(self.answers)

    @cached_property
    def streams(self) -> tuple[StreamTimes, ...]:
        """The streams inside the window, none if there is no time at which all were decoded."""
        told = [answer for answer in self.answers if answer.arrivals]
        if not told or len(told) < len(self.answers):
            return ()
        start = max(answer.began + answer.arrivals[0].seconds for answer in told)
        end = min(answer.began + answer.arrivals[-1].seconds for answer in told)
        streams = [_stream(answer, start - answer.began, end - answer.began) for answer in told]
        whole = tuple(each for each in streams if each is not None)
        return whole if len(whole) == len(told) else ()


def _stream(answer: ServerAnswer, start: float, end: float) -> StreamTimes | None:
    """Returns a stream between two times, in seconds since its request, None if too little of it lies there."""
    characters = sum(arrival.characters for arrival in answer.arrivals)
    tokens = [
        float(arrival.tokens) if arrival.tokens else answer.tokens * arrival.characters / max(1, characters)
        for arrival in answer.arrivals
    ]
    inside = [i for i, arrival in enumerate(answer.arrivals) if start - 1e-6 <= arrival.seconds <= end + 1e-6]
    if len(inside) < 2:
        return None
    times = [answer.arrivals[i].seconds for i in inside]
    told = any(answer.arrivals[i].tokens for i in inside)  # then the server sends a chunk for every pass
    limit = -1.0 if told else _separation([after - before for before, after in pairwise(times)])
    bursts, begins, last = [tokens[inside[0]]], [times[0]], times[0]
    for at, i in zip(times[1:], inside[1:], strict=True):
        if at - last > limit:
            bursts.append(0.0)
            begins.append(at)
        bursts[-1] += tokens[i]
        last = at
    gaps = [after - before for before, after in pairwise(begins)]
    if len(gaps) < 2 or sum(bursts[1:]) < LEAST_TOKENS:
        return None
    longest = _DISTURBED * median(gaps)
    kept = [(gap, size) for gap, size in zip(gaps, bursts[1:], strict=True) if gap <= longest]
    seconds, size_in_all = sum(gap for gap, _ in kept), sum(size for _, size in kept)
    return StreamTimes(seconds, size_in_all, len(kept), tuple(bursts[1:])) if seconds > 0.0 else None


def _separation(gaps: Sequence[float]) -> float:
    """Returns the gap up to which chunks belong to one pass, negative if every chunk is a pass of its own.

    Tokens of one pass arrive within a fraction of its time. Gaps then have two sizes, with nothing between them.
    """
    ordered = sorted(max(gap, 1e-6) for gap in gaps)
    last = len(ordered) - max(_PASSES, round(_SHARE * len(ordered)))
    jumps = [(ordered[i] / ordered[i - 1], i) for i in range(1, last + 1)]
    if not jumps or max(jumps)[0] < _JUMP:
        return -1.0
    at = max(jumps)[1]
    return float((ordered[at - 1] * ordered[at]) ** 0.5)


@dataclass(frozen=True)
class MeasuredLane:
    """A way to decode that is measured.

    Attributes:
        side: The server, and the fields that switch.
        depth: Draft length, 0 for plain decoding, None if it is not known.
    """

    side: Side
    depth: int | None

    @property
    def plain(self) -> bool:
        """Whether it decodes without drafts."""
        return self.depth == 0


def rest_between(one: str, other: str) -> float:
    """Returns the seconds to leave between waves to two servers, which may share processors if they have one host."""
    return _REST if one != other and urlsplit(one).hostname == urlsplit(other).hostname else 0.0


@dataclass
class WaveSender:
    """Sends waves, again if a request of one fails.

    Attributes:
        journal: Waves of earlier runs.
        max_tokens: Tokens of every answer.
        options: Sampling parameters of every request.
        retries: Further tries of a wave.
        pause: Seconds before the first of them; it doubles with each.
    """

    journal: Journal[Wave]
    max_tokens: int
    options: Mapping[str, Any]
    retries: int = 4
    pause: float = 1.0
    _decoded: str = field(default="", init=False)  # the server that decoded last

    def send(self, side: Side, prompts: Sequence[str], tag: str) -> Wave | Refused | Failed:
        """Returns the wave of these prompts. tag: tells apart equal waves."""
        bodies = [self._body(side, prompt) for prompt in prompts]
        key = request_key(f"{side.client.url}/{side.name}", tag, {"wave": bodies})
        known = self.journal.get(key)
        if known is not None:
            return known
        result: Wave | Refused | Failed = Failed("nothing was sent")
        for number in range(self.retries + 1):
            if number:
                time.sleep(min(30.0, self.pause * 2.0 ** (number - 1)))
            result = self._once(side, bodies, f"{tag}/{number}")
            if isinstance(result, Wave):
                self.journal.keep(key, result)
                return result
            if isinstance(result, Refused):
                return result
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
        wrong = next((reply for reply in replies if not isinstance(reply, ServerAnswer)), None)
        if wrong is not None:
            return wrong
        answers = [reply for reply in replies if isinstance(reply, ServerAnswer)]
        after = ServerCounters.of(client.get("/metrics"))
        began = min(answer.began for answer in answers)
        counted = after.since(before, float(sum(answer.tokens - 1 for answer in answers)))
        generated = None
        if before.generated is not None and after.generated is not None:
            generated = after.generated - before.generated
        placed = (replace(answer, began=answer.began - began) for answer in answers)
        return Wave(tuple(placed), counted, generated)

    def _body(self, side: Side, prompt: str) -> Mapping[str, Any]:
        request = EndpointRequest(
            prompt, self.max_tokens, "", temperature=None, top=False, options=self.options, continued=False
        )
        body = side.body(request)
        return body | {"stream": True, "stream_options": {"include_usage": True}}


def described(body: Mapping[str, Any]) -> str:
    """Returns the fields that switch a side, for people."""
    return json.dumps(dict(body)) if body else "as configured"
