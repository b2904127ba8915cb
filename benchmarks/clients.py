"""Clients of the server for ``serving.py``: one request, and many at once."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Answer:
    """What one request got. arrivals: seconds at which text came. text is None where the client went away."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    text: str | None = ""
    tokens: int = 0
    error: str | None = None

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """When each chunk but the first came, and how long after the one before."""
        return [(b, b - a) for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, int]]:
    """A server of its own on a free port. -> its address, and its process"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "foretoken", "serve", "--port", str(port), "--log-level", "error", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(600):
                if process.poll() is not None:
                    raise SystemExit("the server did not start")
                try:
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.1)
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(30)


async def ask(
    client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None, answer: Answer | None = None
) -> Answer:
    """Stream one completion; go away after so many chunks. answer: filled as it comes."""
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
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


async def crowd(count: int, jobs: Sequence[Callable[[], Awaitable[Answer]]]) -> list[Answer]:
    """Carry out all jobs, ``count`` at a time. -> in the order of the jobs"""
    left, found = iter(enumerate(jobs)), [Answer(0.0)] * len(jobs)

    async def one() -> None:
        for number, job in left:
            found[number] = await job()

    await asyncio.gather(*(one() for _ in range(count)))
    return found


def talking(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=600.0, limits=httpx.Limits(max_connections=None))
