"""A client of a server whose answer can be watched while it arrives, or that disconnects."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from foretoken.bench.setting import resident_bytes


@dataclass
class Answer:
    """Result of one request. arrivals: seconds at which text arrived. text: None if the client disconnected early."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    text: str | None = ""
    tokens: int = 0
    error: str | None = None

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Returns, for each chunk but the first, its arrival and the seconds since the previous one."""
        return [(b, b - a) for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def ask(
    client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None, answer: Answer | None = None
) -> Answer:
    """Streams one completion. Disconnects after ``leave_after`` chunks. answer: filled while chunks arrive."""
    answer = answer or Answer(time.perf_counter())
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=request) as response:
        if response.status_code != 200:
            answer.error = f"{response.status_code}: {(await response.aread()).decode()[:200]}"
            return answer
        async for event in events(response):
            if "error" in event:
                answer.error = event["error"]["message"]
            for choice in event.get("choices", ()):
                answer.text = (answer.text or "") + choice["text"]
                if choice["text"]:
                    answer.arrivals.append(time.perf_counter())
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
            if leave_after is not None and len(answer.arrivals) >= leave_after:
                answer.text = None
                return answer
    return answer


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yields the data of each server-sent event, parsed as JSON."""
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def talking(url: str) -> httpx.AsyncClient:
    """Returns an HTTP client for the server at ``url``."""
    return httpx.AsyncClient(base_url=url, timeout=600.0, limits=httpx.Limits(max_connections=None))


async def memory_over_time(process: int, end: float, pause: float) -> list[tuple[float, int]]:
    """Returns seconds and resident bytes of a process, every ``pause`` seconds until ``end`` of ``perf_counter``."""
    started, sizes = time.perf_counter(), list[tuple[float, int]]()
    while time.perf_counter() < end:
        sizes.append((time.perf_counter() - started, resident_bytes(process)))
        await asyncio.sleep(pause)
    return sizes
