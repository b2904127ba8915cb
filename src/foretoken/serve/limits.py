"""Checks before every request: host, API key, rates, sizes and concurrency."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve.errors import ApiError, headers_too_large, invalid_key, too_many_requests
from foretoken.serve.keyring import KeyRing, KeyUsage, check_scope, needed_scope, scopes_without_key
from foretoken.serve.request_log import log_request
from foretoken.serve.request_state import Access, state_of
from foretoken.serve.settings import ServerSettings

MAX_HEADERS = 64 * 2**10  # bytes of a request's headers

_DISCARDED = 8  # times the limit: is read and dropped, because many clients send a whole body before they read
_SMALL = 64 * 2**10  # bytes of each body that are not counted
_LARGE_BODIES = 64  # number of bodies of the largest size that may be in memory at once


class LimitsMiddleware:
    """ASGI middleware. Requests to ``open_paths`` need no key and are not counted.

    A request counts towards ``max_concurrency`` once its body is complete, so that slow senders do not use it up.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, open_paths: frozenset[str], keys: KeyRing) -> None:
        self._app, self._settings, self._open_paths, self._keys = app, settings, open_paths, keys
        self._scoped = keys.several and not settings.share_cache_across_keys
        self._anyone = Access(scopes=scopes_without_key(settings.allow_admin))
        self._bodies = Bodies(settings.max_body, settings.body_timeout)
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, began, is_open = scope, time.monotonic(), scope["path"] in self._open_paths
        if scope["method"] == "HEAD":  # uvicorn sends the headers of the answer alone
            scope = {**scope, "method": "GET"}
        try:
            headers = Headers(scope=scope)
            self._check_head(headers)
            if is_open:
                await self._app(scope, receive, send)
            else:
                await self._guarded(scope, headers, receive, send)
        except ApiError as refusal:
            await refusal.response(scope)(scope, receive, send)
        finally:
            log_request(request, time.monotonic() - began, logging.DEBUG if is_open else logging.INFO)

    async def _guarded(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Passes a request to the app. Raises ApiError if it is refused."""
        usage = self._identified(scope, headers)
        self._check_free()
        self._bodies.check_announced(headers.get("content-length"))
        async with self._bodies.read(receive) as body:
            if body is None:
                return
            self._check_free()
            self._active += 1
            try:
                await self._within_rates(scope, body, receive, send, usage)
            finally:
                self._active -= 1

    def _identified(self, scope: Scope, headers: Headers) -> KeyUsage | None:
        """Stores the key of a request in the scope, and returns the key's usage. Raises ApiError if it is refused."""
        state = state_of(scope)
        if state.identified:  # a replica's front has identified it
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        identity, usage = self._keys.identify(key) if self._keys.asks else None, None
        if self._keys.asks and identity is None and scope["method"] != "OPTIONS":
            raise invalid_key(
                "this server asks for an API key; send it as Authorization: Bearer KEY, or as x-api-key: KEY"
            )
        state.identified, state.access = True, self._anyone
        if identity is not None:
            state.access, state.key, usage = identity.access, identity.digest.hex(), identity.usage
            state.client = state.key if self._scoped else None
        if scope["method"] != "OPTIONS":
            check_scope(state.access, needed_scope(scope["method"], scope["path"]))
        return usage

    async def _within_rates(
        self, scope: Scope, body: bytes, receive: Receive, send: Send, usage: KeyUsage | None
    ) -> None:
        """Passes a request to the app if its key's rates allow it. Raises ApiError."""
        if usage is None or scope["method"] != "POST":
            await self._app(scope, replayed(body, receive), send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(usage.headers())
            await send(message)

        held = usage.begin(len(body))
        try:
            await self._app(scope, replayed(body, receive), sending)
        finally:
            summary = state_of(scope).summary
            usage.end(held, summary.total_tokens if summary else 0)

    def _check_head(self, headers: Headers) -> None:
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADERS:
            raise headers_too_large(MAX_HEADERS)
        host, hosts = headers.get("host"), self._settings.hosts
        if host is not None and hosts is not None and not hosts.allows(host):
            name = host.partition(":")[0]
            message = (
                f"this server does not answer to the Host {host!r}; if it is meant to be reached by that name, start "
                f"it with --allowed-host {name}"
            )
            raise ApiError(403, message, code="host_not_allowed")

    def _check_free(self) -> None:
        limit = self._settings.max_concurrency
        if self._active >= limit:
            raise too_many_requests(f"{limit} requests are being answered, which is as many as may; try again later")


class Bodies:
    """Reads bodies of at most ``limit`` bytes that arrive within ``seconds``, and bounds their memory together."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit, self._seconds = limit, seconds
        self._free = _LARGE_BODIES * limit

    def check_announced(self, length: str | None) -> None:
        """Raises ApiError for a Content-Length so large that the body is not even discarded."""
        if length is not None and length.isdigit() and int(length) > _DISCARDED * self._limit:
            raise self._too_large()

    @asynccontextmanager
    async def read(self, receive: Receive) -> AsyncIterator[bytes | None]:
        """Yields the body, or None if the client disconnected before its end. Its memory is counted until the exit.

        Raises ApiError: 413 too large, 408 too slow, 429 too many large bodies at once.
        """
        buffer, size = bytearray(), 0
        try:
            complete = await self._fill(buffer, receive)
            body, size = bytes(buffer), len(buffer)
            buffer.clear()  # frees the copy while the app runs
            yield body if complete else None
        finally:
            self._free += _counted(max(size, len(buffer)))

    async def _fill(self, buffer: bytearray, receive: Receive) -> bool:
        """Returns whether the body is complete."""
        try:
            async with asyncio.timeout(self._seconds):
                more = True
                while more:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        return False
                    part, more = event.get("body", b""), event.get("more_body", False)
                    if len(buffer) + len(part) > self._limit:
                        await self._discard(receive, len(buffer) + len(part), more)
                        raise self._too_large()
                    needed = _counted(len(buffer) + len(part)) - _counted(len(buffer))
                    if needed > self._free:
                        message = "too many large requests are being received or answered; try again later"
                        raise too_many_requests(message, headers={"Connection": "close"})
                    self._free -= needed
                    buffer += part
                return True
        except TimeoutError:
            message = f"the body did not arrive within the {self._seconds:g} seconds that this server waits for it"
            raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None

    async def _discard(self, receive: Receive, size: int, more: bool) -> None:
        while more and size <= _DISCARDED * self._limit:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than the {self._limit} bytes that this server takes"
        return ApiError(413, message, code="body_too_large")


def _counted(size: int) -> int:
    """Returns the bytes of a body that count towards the memory of all bodies."""
    return max(0, size - _SMALL)


def replayed(body: bytes, receive: Receive) -> Receive:
    """Returns an ASGI ``receive`` that returns the whole body first, and then the messages of ``receive``."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return unread.pop() if unread else await receive()

    return again
