"""Load on any OpenAI-compatible server: streamed completions, their times, and percentiles of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any

import httpx
import numpy as np

from foretoken.core.errors import ForetokenError
from foretoken.core.http import at_once, auth_headers, base_url, listed_models

_SHOWN = 200  # characters of an error
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError)  # an event that is not one of OpenAI's API


@dataclass
class Streamed:
    """One streamed answer.

    Attributes:
        began: When the request was sent, in seconds of ``time.perf_counter``.
        arrivals: When chunks with text arrived.
        prompt_tokens: As the server counts them.
        cached_tokens: Prompt tokens of its prefix cache, 0 if it does not say.
        tokens: Generated tokens.
        error: Why it failed, if it did.
    """

    began: float
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first text (TTFT)."""
        return self.arrivals[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks with text, of which each has one token or more."""
        return [after - before for before, after in pairwise(self.arrivals)]

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first (TPOT); None for a single chunk."""
        if len(self.arrivals) < 2 or self.tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of a quantity, in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles | None:
        """Returns the percentiles of values, None without any."""
        seconds = list(values)
        return cls(*(float(value) for value in np.quantile(seconds, (0.5, 0.9, 0.99)))) if seconds else None


@dataclass(frozen=True)
class LoadResult:
    """What one workload at one concurrency measured.

    Attributes:
        workload: Its name.
        concurrency: Requests at once.
        requests: Requests that were sent.
        failed: How many of them failed.
        seconds: Time from the first request to the last answer.
        prompt_tokens: Mean tokens of a prompt.
        cached_share: Share of prompt tokens that the server had cached.
        output_tokens_per_second: Generated tokens of all requests per second.
        requests_per_second: Answers per second.
        ttft: Seconds to the first text.
        itl: Seconds between chunks with text.
        tpot: Seconds per token after the first.
        error: The first error, if any request failed.
    """

    workload: str
    concurrency: int
    requests: int
    failed: int
    seconds: float
    prompt_tokens: float
    cached_share: float
    output_tokens_per_second: float
    requests_per_second: float
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    error: str | None = None

    @classmethod
    def of(cls, workload: str, concurrency: int, answers: Sequence[Streamed], seconds: float) -> LoadResult:
        """Returns the figures of some answers that took ``seconds`` together."""
        errors = [answer.error or (None if answer.arrivals else "an answer had no text") for answer in answers]
        failed = [error for error in errors if error]
        done = [answer for answer, error in zip(answers, errors, strict=True) if not error]
        prompts = sum(answer.prompt_tokens for answer in done)
        return cls(
            workload=workload,
            concurrency=concurrency,
            requests=len(answers),
            failed=len(failed),
            seconds=seconds,
            prompt_tokens=prompts / len(done) if done else 0.0,
            cached_share=sum(answer.cached_tokens for answer in done) / prompts if prompts else 0.0,
            output_tokens_per_second=sum(answer.tokens for answer in done) / seconds,
            requests_per_second=len(done) / seconds,
            ttft=Percentiles.of(answer.first for answer in done),
            itl=Percentiles.of(gap for answer in done for gap in answer.gaps),
            tpot=Percentiles.of(each for answer in done if (each := answer.per_token) is not None),
            error=failed[0] if failed else None,
        )


class LoadedServer:
    """A server under load.

    Args:
        url: Its address, with or without ``/v1``.
        key: An API key, if it asks for one.
        model: Name of the model; None takes the first that the server lists.
        options: Fields of every request, such as the temperature.
        lengths: ``max_tokens`` of the requests, one after another and again from the first; none: as ``options`` say.

    Raises:
        ForetokenError: It does not answer, or does not list the model.
    """

    def __init__(
        self, url: str, key: str | None, model: str | None, options: dict[str, Any], lengths: Sequence[int] = ()
    ) -> None:
        self.url = base_url(url)
        self._headers = auth_headers(key)
        self._options, self._lengths = options, cycle(lengths)
        listed = [str(entry["id"]) for entry in listed_models(self.url, key)]
        if model is not None and model not in listed:
            raise ForetokenError(f"{self.url} serves no model {model!r}; it serves {', '.join(listed)}")
        self.model = model or listed[0]

    def run(self, workload: str, prompts: Sequence[str], concurrency: int) -> LoadResult:
        """Sends all prompts, ``concurrency`` at a time, and returns what was measured."""

        async def work() -> LoadResult:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(timeout=600.0, limits=limits, headers=self._headers) as client:
                started = time.perf_counter()
                answers = await at_once(concurrency, [self._asking(client, prompt) for prompt in prompts])
                return LoadResult.of(workload, concurrency, answers, time.perf_counter() - started)

        return asyncio.run(work())

    def _asking(self, client: httpx.AsyncClient, prompt: str) -> Callable[[], Awaitable[Streamed]]:
        async def ask() -> Streamed:
            answer = Streamed(time.perf_counter())
            try:
                await self._stream(client, prompt, answer)
            except (httpx.HTTPError, *_MALFORMED) as error:
                answer.error = f"{type(error).__name__}: {error}"
            return answer

        return ask

    async def _stream(self, client: httpx.AsyncClient, prompt: str, answer: Streamed) -> None:
        body = {"model": self.model, "prompt": prompt, "stream": True, **self._options}
        body["stream_options"] = {"include_usage": True}
        if length := next(self._lengths, None):
            body["max_tokens"] = length
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:_SHOWN]}"
                return
            async for line in response.aiter_lines():
                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                    _note(answer, json.loads(line[5:]))


def _note(answer: Streamed, event: Any) -> None:
    """Notes an event of a stream."""
    if error := event.get("error"):
        answer.error = str(error)[:_SHOWN]
    if any(choice.get("text") for choice in event.get("choices") or ()):
        answer.arrivals.append(time.perf_counter())
    if usage := event.get("usage"):
        answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
