"""Requests to a server: retries, rate limits, time limits, and what was spent.

Nothing raises for what a server does: a request ends with an answer, a refusal in the server's words, or a failure with
the reason, and the checks decide what that means.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import httpx

from foretoken.core.http import at_once, auth_headers, base_url
from foretoken.probe.answers import Failed, Refused, Reply, ServerAnswer, answer_of, joined
from foretoken.probe.journal import Journal, request_key, restored_answer

_SHOWN = 200  # characters of a server's words
_REFUSALS = (400, 401, 403, 404, 405, 413, 415, 422, 501)
_IN_A_ROW = 3  # failed requests after which no more are sent
_PAGE_SECONDS = 10.0  # for a page that is not an answer, such as metrics
_PAGE_BYTES = 2**24  # of such a page
_LONGEST_WAIT = 60.0  # seconds between two tries, whatever the server asks for


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to bear with a server.

    Attributes:
        timeout: Seconds for one answer.
        retries: Further tries of a request that failed or was limited.
        pause: Seconds before the first retry; it doubles with each.
    """

    timeout: float = 120.0
    retries: int = 4
    pause: float = 1.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. tag: tells apart requests with equal bodies. top: alternatives asked for at each token."""

    body: Mapping[str, Any]
    tag: str
    top: int = 0


@dataclass(slots=True)
class Spent:
    """What was asked of a server.

    Attributes:
        requests: Requests, retries included.
        retries: Retries.
        prompt_tokens: Prompt tokens, as the server counts them.
        tokens: Generated tokens, as the server counts them.
        resumed: Answers that an earlier run left.
        drafted: Draft tokens of all answers, None if the server does not say.
    """

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    resumed: int = 0
    drafted: int | None = None

    def draft(self, answer: ServerAnswer) -> None:
        """Counts the draft tokens of an answer."""
        if answer.drafted is not None:
            self.drafted = (self.drafted or 0) + answer.drafted


@dataclass(slots=True)
class EndpointClient:
    """A server's address and key, with the patience for it.

    Attributes:
        url: Its address, with or without ``/v1``.
        key: An API key, if it asks for one.
        patience: Time limits and retries.
        journal: Answers of earlier runs.
        tick: Called after every request.
        spent: What was asked of it.
    """

    url: str
    key: str | None = None
    patience: Patience = field(default_factory=Patience)
    journal: Journal[ServerAnswer] = field(default_factory=lambda: Journal(restored_answer))
    tick: Callable[[], None] = field(default=lambda: None)
    spent: Spent = field(default_factory=Spent)
    _failures: int = 0

    def __post_init__(self) -> None:
        self.url = base_url(self.url)

    def post(self, path: str, asks: Sequence[Ask], concurrency: int) -> list[Reply]:
        """Sends requests, ``concurrency`` at a time. Returns a reply to each. path: such as ``completions``."""

        async def work() -> list[Reply]:
            limits, headers = httpx.Limits(max_connections=None), auth_headers(self.key)
            patience, trusted = self.patience.timeout, _certificates()
            async with httpx.AsyncClient(timeout=patience, limits=limits, headers=headers, verify=trusted) as http:
                return await at_once(max(1, concurrency), [partial(self._reply, http, path, ask) for ask in asks])

        return asyncio.run(work())

    def get(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        """Returns the text of a page, "" if there is none or it is too slow or long. body: sent as JSON, by POST."""
        try:
            return asyncio.run(asyncio.wait_for(self._page(path, body), _PAGE_SECONDS))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
            return ""

    async def _page(self, path: str, body: Mapping[str, Any] | None) -> str:
        method, sent, content = "GET" if body is None else "POST", None if body is None else dict(body), bytearray()
        async with (
            httpx.AsyncClient(headers=auth_headers(self.key), timeout=_PAGE_SECONDS, verify=_certificates()) as http,
            http.stream(method, f"{self.url}{path}", json=sent) as answer,
        ):
            if answer.status_code != 200:
                return ""
            async for chunk in answer.aiter_bytes():
                content += chunk
                if len(content) > _PAGE_BYTES:
                    return ""
            return content.decode(answer.encoding or "utf-8", "replace")

    async def _reply(self, http: httpx.AsyncClient, path: str, ask: Ask) -> Reply:
        key = request_key(f"{self.url}/{path}", ask.tag, ask.body)
        known = self.journal.get(key)
        if known is not None:
            if key in self.journal.resumed:
                self.spent.resumed += 1
                self.spent.draft(known)
            return known
        if self._failures >= _IN_A_ROW:
            return Failed(f"not sent, after {_IN_A_ROW} failures in a row")
        reply = await self._tried(http, path, ask)
        self._failures = self._failures + 1 if isinstance(reply, Failed) else 0
        if isinstance(reply, ServerAnswer):
            self.spent.tokens += reply.tokens
            self.spent.prompt_tokens += reply.prompt_tokens
            self.spent.draft(reply)
            self.journal.keep(key, reply)
        self.tick()
        return reply

    async def _tried(self, http: httpx.AsyncClient, path: str, ask: Ask) -> Reply:
        """Sends a request until there is an answer or a refusal, or no try is left."""
        tries = self.patience.retries + 1
        for number in range(tries):
            self.spent.requests += 1
            self.spent.retries += number > 0
            wait = None
            try:
                return await asyncio.wait_for(self._once(http, path, ask), self.patience.timeout)
            except _LimitedError as limited:
                why, wait = str(limited), limited.wait
            except TimeoutError:
                why = f"no answer within {self.patience.timeout:g} s"
            except (httpx.HTTPError, ValueError, OverflowError, RecursionError, TypeError) as error:
                why = str(error) or type(error).__name__
            except httpx.InvalidURL as error:
                return Failed(f"{self.url} is no address: {error}")
            if number + 1 < tries:
                pause = self.patience.pause * 2.0**number * random.uniform(0.75, 1.25)
                await asyncio.sleep(min(_LONGEST_WAIT, pause if wait is None else wait))
        return Failed(f"{why} (tried {tries} times)" if tries > 1 else why)

    async def _once(self, http: httpx.AsyncClient, path: str, ask: Ask) -> Reply:
        began, url = time.perf_counter(), f"{self.url}/v1/{path}"
        if ask.body.get("stream"):
            async with http.stream("POST", url, json=dict(ask.body)) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    return _refusal(answer)
                lines, times = list[str](), list[float]()
                async for line in answer.aiter_lines():
                    if line.startswith("data:"):
                        lines.append(line[5:].strip())
                        times.append(time.perf_counter() - began)
            whole = bool(lines) and lines[-1] == "[DONE]"
            events = [json.loads(line) for line in (lines[:-1] if whole else lines)]
            streamed = joined(events, ask.top, times[: len(events)], time.perf_counter() - began)
            if not whole:
                raise ValueError("the stream was closed before its end")
            return replace(streamed, began=began)
        answer = await http.post(url, json=dict(ask.body))
        if answer.status_code != 200:
            return _refusal(answer)
        return answer_of(answer.json(), ask.top, time.perf_counter() - began)


@cache
def _certificates() -> ssl.SSLContext:
    """Returns the trusted certificates, which take long to read."""
    return httpx.create_ssl_context()


class _LimitedError(Exception):
    """The server is limited or broken for now. wait: seconds that it asks for."""

    def __init__(self, why: str, wait: float | None) -> None:
        super().__init__(why)
        self.wait = wait


def _refusal(answer: httpx.Response) -> Refused:
    """Returns a refusal. Raises _LimitedError if another try may help."""
    why = f"{answer.status_code}: {_words(answer)}"
    if answer.status_code in _REFUSALS:
        return Refused(why)
    asked = answer.headers.get("retry-after", "")
    raise _LimitedError(why, float(asked) if asked.replace(".", "", 1).isdigit() else None)


def _words(answer: httpx.Response) -> str:
    try:
        error = answer.json()["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError, RecursionError):
        said = answer.text
    return " ".join(str(said).split())[:_SHOWN] or answer.reason_phrase
