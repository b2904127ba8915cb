"""Clients of the server for ``serving.py``: one request, or many at once."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

START_SECONDS = 600.0  # in which a server must have started


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


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, int]]:
    """Runs a server on a free port within the ``with`` block. Yields its address and its process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "foretoken", "serve", "--port", str(port), "--log-level", "error", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            end = time.monotonic() + START_SECONDS
            while not healthy(url):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit("the server did not start")
                time.sleep(0.1)
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(120)


def healthy(url: str) -> bool:
    """Returns whether a server at ``url`` answers."""
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


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
