"""Reads the bodies of requests whole, within limits of size, time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Receive

from foretoken.serve.errors import RETRY_SECONDS, ApiError

_DISCARDED = 8  # times the limit are read and dropped, so that a client that sends first gets to read the answer
_SMALL = 64 * 2**10  # bytes of a body that always find room
_LARGE_BODIES = 64  # so many of the largest size may be in memory at once


class Bodies:
    """Reads bodies of at most ``limit`` bytes that arrive within ``seconds``."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit, self._seconds = limit, seconds
        self._free = _LARGE_BODIES * limit

    def check_announced(self, length: str | None) -> None:
        """Raises ApiError for a Content-Length that is not even worth discarding."""
        if length is not None and length.isdigit() and int(length) > _DISCARDED * self._limit:
            raise self._too_large()

    @asynccontextmanager
    async def read(self, receive: Receive) -> AsyncIterator[bytes | None]:
        """Yields the body, or None where the client went away before its end. Its memory is counted until the exit.

        Raises:
            ApiError: 413 too large, 408 too slow, 429 too many large bodies at once.
        """
        buffer, size = bytearray(), 0
        try:
            complete = await self._fill(buffer, receive)
            body, size = bytes(buffer), len(buffer)
            buffer.clear()  # the app lives on with ``body`` alone
            yield body if complete else None
        finally:
            self._free += _counted(max(size, len(buffer)))

    async def _fill(self, buffer: bytearray, receive: Receive) -> bool:
        """Returns whether the body is complete."""
        try:
            async with asyncio.timeout(self._seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part, more = message.get("body", b""), message.get("more_body", False)
                    if len(buffer) + len(part) > self._limit:
                        await self._discard(receive, len(buffer) + len(part), more)
                        raise self._too_large()
                    needed = _counted(len(buffer) + len(part)) - _counted(len(buffer))
                    if needed > self._free:
                        raise _crowded()
                    self._free -= needed
                    buffer += part
                return True
        except TimeoutError:
            raise self._too_slow() from None

    async def _discard(self, receive: Receive, size: int, more: bool) -> None:
        while more and size <= _DISCARDED * self._limit:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than the {self._limit} bytes that this server takes"
        return ApiError(413, message, code="body_too_large")

    def _too_slow(self) -> ApiError:
        message = f"the body did not arrive within the {self._seconds:g} seconds that this server waits for it"
        return ApiError(408, message, code="body_timeout", headers={"Connection": "close"})


def _counted(size: int) -> int:
    """Bytes of a body that count towards the memory of all."""
    return max(0, size - _SMALL)


def _crowded() -> ApiError:
    retry = {"Retry-After": str(RETRY_SECONDS), "Connection": "close"}
    message = "too many large requests are being received or answered; try again later"
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers=retry)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the whole body first, and then what ``receive`` gives."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return unread.pop() if unread else await receive()

    return again
