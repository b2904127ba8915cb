"""Ways to reach a drafting worker: a thread, or a process of this machine. Both carry bytes, in order, either way.

What runs there is ``PROGRAM``. It is started by its name, as any program is: it makes proposers, so it stands above the
proposers that start it.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Protocol

from foretoken.core.errors import ForetokenError, InvalidRequest

PROGRAM = "foretoken.engine.drafting"
_GRACE = 5.0  # seconds that a worker has to end by itself

Arrivals = queue.SimpleQueue[bytes | None]  # None: nothing will come any more


class Lost(ForetokenError):
    """The other side is gone, or does not answer."""


class Closed(Exception):
    """On the worker's side: the engine is gone."""


class Link(Protocol):
    """The engine's side."""

    def send(self, message: bytes) -> None:
        """Hand over; does not wait until it is read. Raises Lost."""
        ...

    def receive(self, seconds: float) -> bytes | None:
        """The next message, None where none comes in that time. Raises Lost."""
        ...

    def close(self) -> None:
        """End the worker. Closing twice does nothing."""
        ...


class Line(Protocol):
    """The worker's side."""

    def poll(self) -> bytes | None:
        """A message that is there already, else None. Raises Closed."""
        ...

    def wait(self) -> bytes:
        """The next message, however long it takes. Raises Closed."""
        ...

    def reply(self, message: bytes) -> None:
        """Raises Closed."""
        ...


class Queued:
    """A line between threads of one process."""

    def __init__(self) -> None:
        self.incoming: Arrivals = queue.SimpleQueue()
        self.outgoing: Arrivals = queue.SimpleQueue()

    def poll(self) -> bytes | None:
        return None if self.incoming.empty() else self.wait()

    def wait(self) -> bytes:
        message = self.incoming.get()
        if message is None:
            self.incoming.put(None)  # whoever asks again is told again
            raise Closed
        return message

    def reply(self, message: bytes) -> None:
        self.outgoing.put(message)


class Threaded:
    """A worker in a thread of this process; it shares the machine's cores and the interpreter with the engine."""

    def __init__(self, work: Callable[[Line], None]) -> None:
        self._line = line = Queued()

        def run() -> None:
            try:
                work(line)
            finally:
                line.outgoing.put(None)

        thread = threading.Thread(target=run, name="foretoken-drafting", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end_thread, line, thread)

    def send(self, message: bytes) -> None:
        self._line.incoming.put(message)

    def receive(self, seconds: float) -> bytes | None:
        return arrived(self._line.outgoing, seconds)


class Process:
    """A worker in a process of its own; ``order`` says what it loads. Raises InvalidRequest where that cannot be."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        if os.name != "posix":
            raise InvalidRequest("transport 'process' needs a POSIX system; take 'thread' or 'ray' here")
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-P", "-m", PROGRAM, str(there.fileno())]
            self.process = subprocess.Popen(command, pass_fds=(there.fileno(),), stdin=subprocess.DEVNULL)
        self._connection = Connection(here.detach())
        self._arrivals: Arrivals = queue.SimpleQueue()
        reader = threading.Thread(
            target=_read, args=(self._connection, self._arrivals), name="foretoken-drafts", daemon=True
        )
        reader.start()
        self.close = weakref.finalize(self, _end_process, self.process, self._connection, reader)
        self.send(json.dumps(dict(order)).encode())

    def send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise Lost(f"the process that drafts is gone ({error})") from None

    def receive(self, seconds: float) -> bytes | None:
        return arrived(self._arrivals, seconds)


class Pipe:
    """The line of a process whose connection to the engine is this descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def poll(self) -> bytes | None:
        try:
            return self._connection.recv_bytes() if self._connection.poll(0) else None
        except (EOFError, OSError):
            raise Closed from None

    def wait(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise Closed from None

    def reply(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError:
            raise Closed from None


def thread(order: Mapping[str, Any]) -> Threaded:
    """``PROGRAM`` in a thread."""
    serve = import_module(PROGRAM).serve
    return Threaded(lambda line: serve(line, order))


def arrived(arrivals: Arrivals, seconds: float) -> bytes | None:
    """The next of ``arrivals``, None where none comes in time; 0 seconds take what is there. Raises Lost at the end."""
    try:
        message = arrivals.get(timeout=seconds) if seconds > 0 else arrivals.get_nowait()
    except queue.Empty:
        return None
    if message is None:
        arrivals.put(None)
        raise Lost("the worker that drafts is gone")
    return message


def _read(connection: Connection, arrivals: Arrivals) -> None:
    """Until the end: what the worker writes is taken in at once, so that it never waits for the engine."""
    try:
        while True:
            arrivals.put(connection.recv_bytes())
    except (EOFError, OSError):
        arrivals.put(None)


def _end_thread(line: Queued, thread: threading.Thread) -> None:
    line.incoming.put(None)
    if thread is not threading.current_thread():
        thread.join(_GRACE)


def _end_process(process: subprocess.Popen[bytes], connection: Connection, reader: threading.Thread) -> None:
    """The end of its input ends the worker, and the worker's end the reader."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shut, suppress(OSError):  # it may be gone already
        shut.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    reader.join(_GRACE)
    connection.close()
