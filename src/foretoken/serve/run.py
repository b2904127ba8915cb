"""Runs the app on a socket, and shuts it down gracefully."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from foretoken.serve.limits import MAX_HEADERS
from foretoken.serve.listening import bind as bind
from foretoken.serve.protocol import HttpProtocol
from foretoken.serve.tls import TlsFiles

_log = logging.getLogger(__name__)

_LAST_WORDS = 5.0  # seconds to send the errors of requests that were ended


class Servable(Protocol):
    """The part of the app's ``Worker`` or ``Front`` that ``Server`` uses."""

    draining: bool

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        ...

    def abandon(self) -> None:
        """Ends unfinished requests."""
        ...


class Server(uvicorn.Server):
    """Shuts down in two steps: the first signal refuses new requests and lets others finish; the second stops at once.

    Args:
        app: The app.
        worker: Answers its requests.
        drain_timeout: Seconds for running requests to finish. Then they end with an error.
        announce: Called once requests are accepted.
        tls: Certificate; None serves without TLS.
    """

    def __init__(
        self,
        app: FastAPI,
        worker: Servable,
        drain_timeout: float = 30.0,
        announce: Callable[[], None] = lambda: None,
        tls: TlsFiles | None = None,
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
        self._app, self._tls = app, tls
        self._drained_by: float | None = None
        self._reload_asked = False
        if tls is not None:
            self.config.load()
            self.config.ssl = tls.context()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self._worker.draining:
            self.should_exit = self.force_exit = True
        else:
            self.drain()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handles signals within the ``with`` block, in the main thread. SIGHUP reloads if there is what to reload.

        Otherwise it ends the process as usual, when its terminal is closed for instance.
        """
        hangup = getattr(signal, "SIGHUP", None) if self._tls is not None or self._app.state.keys.reloads else None
        if hangup is None or threading.current_thread() is not threading.main_thread():
            with super().capture_signals():
                yield
            return
        before = signal.signal(hangup, lambda number, frame: self.reload())
        try:
            with super().capture_signals():
                yield
        finally:
            signal.signal(hangup, before)

    def drain(self) -> None:
        """Refuses new requests from here on, and ends the server when the running ones are done."""
        self._drained_by = time.monotonic() + self._drain_timeout
        self._worker.draining = True

    def reload(self) -> None:
        """Reads API keys and certificates again at the next tick. May be called by a signal handler."""
        self._reload_asked = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        await super().startup(sockets)
        self._announce()

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to end. uvicorn calls this ten times a second."""
        if self._reload_asked:
            self._reload_asked = False
            self._app.state.keys.reload()
            if self._tls is not None and self.config.ssl is not None:
                self._tls.reload(self.config.ssl)
        if self._drained_by is not None and (not self._worker.busy or time.monotonic() > self._drained_by):
            self._worker.abandon()
            self.should_exit = True
        return await super().on_tick(counter)
