"""The app on a socket, and a graceful end."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from foretoken.serve.limits import MAX_HEADERS
from foretoken.serve.listening import bind as bind
from foretoken.serve.protocol import HttpProtocol

_log = logging.getLogger(__name__)

_LAST_WORDS = 5.0  # seconds for answers to be sent when requests have been ended


class Servable(Protocol):
    """What a server asks of whoever answers: a ``Worker``, for instance."""

    draining: bool

    @property
    def busy(self) -> bool: ...
    def abandon(self) -> None: ...


class Server(uvicorn.Server):
    """Ends in two steps: told once, it refuses new requests and lets others finish; told twice, it stops.

    drain_timeout: seconds for others to finish, after which they are ended with an error.
    announce: called once requests are taken.
    """

    def __init__(
        self, app: FastAPI, worker: Servable, drain_timeout: float = 30.0, announce: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=int(_LAST_WORDS),
                http=HttpProtocol,
                h11_max_incomplete_event_size=MAX_HEADERS,
            )
        )
        self._worker, self._drain_timeout, self._announce = worker, drain_timeout, announce
        self._drained_by: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        if self._worker.draining:
            self.should_exit = self.force_exit = True
        else:
            self.drain()

    def drain(self) -> None:
        """Refuse new requests from now on, and end when the others are done."""
        self._drained_by = time.monotonic() + self._drain_timeout
        self._worker.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._announce()

    async def on_tick(self, counter: int) -> bool:
        """uvicorn asks ten times a second whether to end."""
        if self._drained_by is not None and (not self._worker.busy or time.monotonic() > self._drained_by):
            self._worker.abandon()
            self.should_exit = True
        return await super().on_tick(counter)
