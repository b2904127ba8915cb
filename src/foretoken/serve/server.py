"""Runs the app on a socket, with bounded request heads and a graceful shutdown."""

import asyncio
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from foretoken.serve.errors import ApiError, headers_too_large
from foretoken.serve.limits import MAX_HEADERS
from foretoken.serve.request_state import HEADER, new_request_id
from foretoken.serve.settings import TlsFiles

_log = logging.getLogger(__name__)

_GRACE = 5.0  # seconds to send the errors of requests that were ended


class Servable(Protocol):
    """The interface of ``Worker`` and ``Front`` that ``Server`` uses."""

    draining: bool

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        ...

    def abandon(self) -> None:
        """Ends unfinished requests."""
        ...


class Server(uvicorn.Server):
    """Shuts down in two steps: one signal refuses new requests and lets others finish; a second one stops at once."""

    def __init__(
        self,
        app: FastAPI,
        workers: Sequence[Servable],
        drain_timeout: float = 30.0,  # seconds for running requests to finish; then they end with an error
        announce: Callable[[], None] = lambda: None,  # called once requests are accepted
        tls: TlsFiles | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=int(_GRACE),
                http=HttpProtocol,
                h11_max_incomplete_event_size=MAX_HEADERS,
            )
        )
        self._workers, self._drain_timeout, self._announce = workers, drain_timeout, announce
        self._app, self._tls = app, tls
        self._drained_by: float | None = None
        self._reload_requested = False
        if tls is not None:
            self.config.load()
            self.config.ssl = tls.context()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if any(worker.draining for worker in self._workers):
            self.should_exit = self.force_exit = True
        else:
            self.drain()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handles signals within the ``with`` block, in the main thread. SIGHUP reloads keys and certificates, if any.

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
        for worker in self._workers:
            worker.draining = True

    def reload(self) -> None:
        """Reads API keys and certificates again at the next tick. May be called by a signal handler."""
        self._reload_requested = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to end. uvicorn calls this ten times a second."""
        if self._reload_requested:
            self._reload_requested = False
            self._app.state.keys.reload()
            if self._tls is not None and self.config.ssl is not None:
                self._tls.reload(self.config.ssl)
        if self._drained_by is not None:
            busy = any(worker.busy for worker in self._workers)
            if not busy or time.monotonic() > self._drained_by:
                for worker in self._workers:
                    worker.abandon()
                self.should_exit = True
        return await super().on_tick(counter)


class HttpProtocol(H11Protocol):
    """Closes connections whose request head does not arrive in time, and answers malformed requests as OpenAI does.

    It uses h11 because httptools buffers a header line of any length, while h11 refuses one that exceeds
    ``h11_max_incomplete_event_size``.
    """

    head_seconds = 20.0

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer of the request head."""
        super().connection_made(transport)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Starts the timer for the next request. It also runs while the rest of an unread body arrives."""
        self._wait_for_request()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers a malformed request. Called while an h11.RemoteProtocolError is handled."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun
            return
        error = sys.exception()
        answer = ApiError(400, f"this is not an HTTP request: {error}")
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            answer = headers_too_large(MAX_HEADERS)
        body = json.dumps(answer.body()).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        headers[HEADER] = new_request_id()
        events = (h11.Response(status_code=answer.status, headers=list(headers.items())), h11.Data(data=body))
        for event in (*events, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_request(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.head_seconds, self._give_up, self.cycle)

    def _give_up(self, last: Any) -> None:
        if self.cycle is last:
            self.transport.close()
