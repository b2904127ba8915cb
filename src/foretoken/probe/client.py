"""Requests to a server: retries, rate limits, time limits, and the answers of earlier runs.

Nothing raises for a server's behaviour: a request ends with an answer, a refusal in the server's words, or a failure
with the reason, and the analyses decide what that means.
"""

import asyncio
import hashlib
import json
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from foretoken.core.errors import WriteError
from foretoken.core.http import at_once, auth_headers, base_url
from foretoken.probe.answers import Failed, Refused, Reply, ServerAnswer, answer_of, joined

T = TypeVar("T")

_SHOWN = 200  # characters of a server's words
_REFUSALS = (400, 401, 403, 404, 405, 413, 415, 422, 501)
_PAGE_SECONDS = 10.0  # for a page that is not an answer, such as metrics
_PAGE_BYTES = 2**24  # of such a page
_LONGEST_WAIT = 60.0  # seconds between two tries, whatever the server requests


class Journal(Generic[T]):
    """Answers by request, so that nothing is requested twice. resumed: keys of the answers of an earlier run.

    Args:
        kind: Type of an answer, a dataclass.
        file: JSON lines, one for each answer; None keeps them in memory alone. An incomplete last line is ignored.

    Raises:
        WriteError: The file cannot be read or written.
    """

    def __init__(self, kind: type[T], file: Path | None = None) -> None:
        self._file, self._adapter = file, TypeAdapter(kind)
        self._answers: dict[str, T] = {}
        if file is not None:
            try:
                lines = file.read_text("utf-8").splitlines() if file.exists() else []
                self._answers = dict(filter(None, (_restored(line, self._adapter) for line in lines)))
                self._out = file.open("a", encoding="utf-8")
            except OSError as error:
                raise WriteError(f"cannot keep answers in {file}: {error.strerror}; choose another --output") from error
        self.resumed = frozenset(self._answers)

    def get(self, key: str) -> T | None:
        """Returns the answer to an earlier request, of this run or the one before."""
        return self._answers.get(key)

    def keep(self, key: str, answer: T) -> None:
        self._answers[key] = answer
        if self._file is not None:
            record = {"key": key, "answer": self._adapter.dump_python(answer)}
            self._out.write(json.dumps(record) + "\n")
            self._out.flush()

    def close(self, finished: bool) -> None:
        """Closes the file, and removes it if the run is finished."""
        if self._file is not None:
            self._out.close()
            if finished:
                self._file.unlink(missing_ok=True)


def _restored(line: str, adapter: TypeAdapter[T]) -> tuple[str, T] | None:
    try:
        record = json.loads(line)
        return str(record["key"]), adapter.validate_python(record["answer"])
    except (ValidationError, ValueError, LookupError, TypeError):
        return None


def request_key(url: str, tag: str, body: Mapping[str, Any]) -> str:
    """Returns the key of a request. tag: distinguishes equal requests."""
    text = json.dumps([url, tag, body], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits and retries."""

    timeout: float = 120.0  # seconds for one answer
    retries: int = 4  # of a request that failed or was limited
    pause: float = 1.0  # seconds before the first retry; it doubles with each
    failures: int = 3  # failed requests in a row after which no more are sent


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. tag: distinguishes requests with equal bodies. top: alternatives requested at each token."""

    body: Mapping[str, Any]
    tag: str
    top: int = 0


@dataclass(slots=True)
class Spent:
    """Requests to a server, and tokens as it counts them. drafted: None if it does not count draft tokens."""

    requests: int = 0  # retries included
    retries: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    resumed: int = 0  # answers of an earlier run
    drafted: int | None = None

    def add(self, answer: ServerAnswer, resumed: bool = False) -> None:
        if resumed:
            self.resumed += 1
        else:
            self.tokens += answer.tokens
            self.prompt_tokens += answer.prompt_tokens
        if answer.drafted is not None:
            self.drafted = (self.drafted or 0) + answer.drafted


@dataclass(slots=True)
class EndpointClient:
    """A server's address and key. tick: called after every request."""

    url: str  # with or without /v1
    key: str | None = None
    patience: Patience = field(default_factory=Patience)
    journal: Journal[ServerAnswer] = field(default_factory=lambda: Journal(ServerAnswer))
    tick: Callable[[], None] = field(default=lambda: None)
    spent: Spent = field(default_factory=Spent)
    _failures: int = 0

    def __post_init__(self) -> None:
        self.url = base_url(self.url)

    def post(self, path: str, asks: Sequence[Ask], concurrency: int) -> list[Reply]:
        """Sends requests, ``concurrency`` at a time. Returns a reply to each. path: such as ``completions``."""

        async def work() -> list[Reply]:
            async with self._http(self.patience.timeout, limits=httpx.Limits(max_connections=None)) as http:
                return await at_once(max(1, concurrency), [partial(self._reply, http, path, ask) for ask in asks])

        return asyncio.run(work())

    def get(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        """Returns the text of a page, "" if there is none or it is too slow or long. body: sent as JSON, by POST."""
        try:
            return asyncio.run(asyncio.wait_for(self._page(path, body), _PAGE_SECONDS))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
            return ""

    def _http(self, timeout: float, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=timeout, headers=auth_headers(self.key), verify=_certificates(), **options)

    async def _page(self, path: str, body: Mapping[str, Any] | None) -> str:
        method, sent, content = "GET" if body is None else "POST", None if body is None else dict(body), bytearray()
        async with self._http(_PAGE_SECONDS) as http, http.stream(method, f"{self.url}{path}", json=sent) as answer:
            if answer.status_code != 200:
                return ""
            async for chunk in answer.aiter_bytes():
                content += chunk
                if len(content) > _PAGE_BYTES:
                    return ""
            return content.decode(answer.encoding or "utf-8", "replace")

    async def _reply(self, http: httpx.AsyncClient, path: str, ask: Ask) -> Reply:
        key = request_key(f"{self.url}/{path}", ask.tag, ask.body)
        if (earlier := self.journal.get(key)) is not None:
            if key in self.journal.resumed:
                self.spent.add(earlier, resumed=True)
            return earlier
        if self._failures >= self.patience.failures:
            return Failed(f"not sent, after {self.patience.failures} failures in a row")
        reply = await self._tried(http, path, ask)
        self._failures = self._failures + 1 if isinstance(reply, Failed) else 0
        if isinstance(reply, ServerAnswer):
            self.spent.add(reply)
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
        if not ask.body.get("stream"):
            answer = await http.post(url, json=dict(ask.body))
            if answer.status_code != 200:
                return _refusal(answer)
            return answer_of(answer.json(), ask.top, time.perf_counter() - began)
        lines, times = list[str](), list[float]()
        async with http.stream("POST", url, json=dict(ask.body)) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return _refusal(answer)
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    lines.append(line[5:].strip())
                    times.append(time.perf_counter() - began)
        complete = bool(lines) and lines[-1] == "[DONE]"
        events = [json.loads(line) for line in (lines[:-1] if complete else lines)]
        streamed = joined(events, ask.top, times[: len(events)], time.perf_counter() - began)
        if not complete:
            raise ValueError("the stream was closed before its end")
        return replace(streamed, began=began)


@cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # slow, because it reads all trusted certificates


class _LimitedError(Exception):
    """The server is limited or broken for now. wait: seconds that it requests."""

    def __init__(self, why: str, wait: float | None) -> None:
        super().__init__(why)
        self.wait = wait


def _refusal(answer: httpx.Response) -> Refused:
    """Returns a refusal. Raises _LimitedError if another try may help."""
    try:
        error = answer.json()["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError, RecursionError):
        said = answer.text
    why = f"{answer.status_code}: {' '.join(str(said).split())[:_SHOWN] or answer.reason_phrase}"
    if answer.status_code in _REFUSALS:
        return Refused(why)
    asked = answer.headers.get("retry-after", "")
    raise _LimitedError(why, float(asked) if asked.replace(".", "", 1).isdigit() else None)
