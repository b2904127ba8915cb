"""One request as its client's side sees it, between the engine's thread and the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from foretoken.core.context import Context
from foretoken.engine.requests import Request
from foretoken.outputs import StreamPiece

Built = tuple[Request, list[Context]]
Delivery = tuple["RequestStream", StreamPiece | Exception]


class RequestStream:
    """One or more prompts in work. Iterate over it, once: it yields pieces, and ends when all have ended.

    Raises what ended the request early: InvalidRequest, RequestFailed or Unavailable. Belongs to its event loop, but
    for ``began``. What is not read yet stays here: at most what the request can produce.
    arrived, began: when it was submitted, and when the engine took it up, by ``time.monotonic``.
    release: called once when it is over, with whether the engine still works on it.
    """

    def __init__(self, built: Sequence[Built], priority: int, release: Callable[[RequestStream, bool], None]) -> None:
        self.built, self.priority = built, priority
        self.requests = [request for request, _ in built]
        self.members = [member for request in self.requests for member in request.members]
        self.loop = asyncio.get_running_loop()
        self.arrived = time.monotonic()
        self.began: float | None = None
        self._release, self._left = release, len(self.members)
        self._pieces: deque[StreamPiece] = deque()
        self._error: Exception | None = None
        self._over = False
        self._news = asyncio.Event()

    @property
    def request(self) -> Request:
        """The first, and mostly the only one."""
        return self.requests[0]

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamPiece:
        while not self._pieces and not self._over:
            self._news.clear()
            await self._news.wait()
        if self._pieces:
            return self._pieces.popleft()
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Nothing more is wanted; what is over already stays so."""
        self._pieces.clear()
        self.end(None, abort=True)

    def push(self, piece: StreamPiece) -> None:
        """Take in what the engine made."""
        if self._over:
            return
        self._pieces.append(piece)
        self._left -= piece.output is not None
        if not self._left:
            self.end(None)
        self._news.set()

    def end(self, error: Exception | None, abort: bool = False) -> None:
        """No more pieces will come. ``abort``: the engine still works on it."""
        if not self._over:
            self._over, self._error = True, error
            self._news.set()
            self._release(self, abort)


def hand_over(deliveries: Sequence[Delivery]) -> None:
    """On the event loop: everyone gets what is theirs."""
    for ticket, item in deliveries:
        if isinstance(item, Exception):
            ticket.end(item)
        else:
            ticket.push(item)
