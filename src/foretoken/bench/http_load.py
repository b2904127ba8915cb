"""Load on any OpenAI-compatible server: streamed completions, their times, and percentiles of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from foretoken.core.errors import ForetokenError
from foretoken.core.http import base_url, listed_models
from foretoken.probe.answers import Reply, ServerAnswer
from foretoken.probe.client import Ask, EndpointClient, Patience

_PATIENCE = 600.0  # seconds for one answer


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
    """Figures of one workload at one concurrency.

    Attributes:
        workload: Its name.
        concurrency: Requests at once.
        requests: Requests that were sent.
        failed: Requests that failed.
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
    def of(cls, workload: str, concurrency: int, replies: Sequence[Reply], seconds: float) -> LoadResult:
        """Returns the figures of replies that took ``seconds`` together."""
        done = [reply for reply in replies if isinstance(reply, ServerAnswer) and reply.arrivals]
        errors = [reason for reply in replies if (reason := _failure(reply))]
        prompts = sum(answer.prompt_tokens for answer in done)
        return cls(
            workload=workload,
            concurrency=concurrency,
            requests=len(replies),
            failed=len(errors),
            seconds=seconds,
            prompt_tokens=prompts / len(done) if done else 0.0,
            cached_share=sum(answer.cached_tokens for answer in done) / prompts if prompts else 0.0,
            output_tokens_per_second=sum(answer.tokens for answer in done) / seconds,
            requests_per_second=len(done) / seconds,
            ttft=Percentiles.of(answer.arrivals[0].seconds for answer in done),
            itl=Percentiles.of(gap for answer in done for gap in answer.gaps),
            tpot=Percentiles.of(value for answer in done if (value := answer.per_token) is not None),
            error=errors[0] if errors else None,
        )


def _failure(reply: Reply) -> str:
    """Returns the reason why a request failed, "" if it did not."""
    if isinstance(reply, ServerAnswer):
        return "" if reply.arrivals else "an answer had no text"
    return reply.why


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
        self.url, self._key = base_url(url), key
        self._options, self._lengths = options, cycle(lengths)
        listed = [str(entry["id"]) for entry in listed_models(self.url, key)]
        if model is not None and model not in listed:
            raise ForetokenError(f"{self.url} serves no model {model!r}; it serves {', '.join(listed)}")
        self.model = model or listed[0]

    def run(self, workload: str, prompts: Sequence[str], concurrency: int) -> LoadResult:
        """Sends all prompts, ``concurrency`` at a time, and returns the figures."""
        client = EndpointClient(self.url, self._key, Patience(timeout=_PATIENCE, retries=0, failures=len(prompts)))
        asks = [Ask(self._body(prompt), str(number)) for number, prompt in enumerate(prompts)]
        started = time.perf_counter()
        replies = client.post("completions", asks, concurrency)
        return LoadResult.of(workload, concurrency, replies, time.perf_counter() - started)

    def _body(self, prompt: str) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "stream": True, **self._options}
        length = next(self._lengths, None)
        return body | {"stream_options": {"include_usage": True}} | ({"max_tokens": length} if length else {})
