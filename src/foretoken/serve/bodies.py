"""Reads the bodies of requests whole, within limits of size, time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Receive

from foretoken.serve.errors import RETRY_SECONDS, ApiError

_DISCARDED = 8  # times the limit: is read and dropped, because many clients send a whole body before they read
_SMALL = 64 * 2**10  # bytes of each body that are not counted
_LARGE_BODIES = 64  # number of bodies of the largest size that may be in memory at once


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

        Raises:
            ApiError: 413 too large, 408 too slow, 429 too many large bodies at once.
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
    """Returns how many bytes of a body count towards the memory of all bodies."""
    return max(0, size - _SMALL)


def _crowded() -> ApiError:
    retry = {"Retry-After": str(RETRY_SECONDS), "Connection": "close"}
    message = "too many large requests are being received or answered; try again later"
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers=retry)


def replayed(body: bytes, receive: Receive) -> Receive:
    """Returns an ASGI ``receive`` that returns the whole body first, and then the messages of ``receive``."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return unread.pop() if unread else await receive()

    return again
