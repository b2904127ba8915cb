"""Transports between the engine and a drafting worker in a thread or in a process on this machine.

Messages are bytes and arrive in order, in both directions. The worker runs ``PROGRAM``. It is started by module name
because it builds proposers, so it sits above the proposers in the import order.
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
_EXIT_TIMEOUT = 5.0  # seconds to wait for a worker to end; a process is then killed

MessageQueue = queue.SimpleQueue[bytes | None]  # None marks the end of the stream


class WorkerLost(ForetokenError):
    """Raised on the engine's side when the worker has ended or does not answer."""


class EngineClosed(Exception):
    """Raised on the worker's side when the engine has closed the connection."""


class EngineEndpoint(Protocol):
    """The engine's side of a transport."""

    def send(self, message: bytes) -> None:
        """Queues a message for the worker without waiting until it is read.

        Raises:
            WorkerLost: The worker has ended.
        """
        ...

    def receive(self, seconds: float) -> bytes | None:
        """Returns the next message, or None if none arrives within ``seconds``.

        Raises:
            WorkerLost: The worker has ended.
        """
        ...

    def close(self) -> None:
        """Ends the worker. A second call does nothing."""
        ...


class WorkerEndpoint(Protocol):
    """The worker's side of a transport. Every method raises EngineClosed when the engine has gone."""

    def poll(self) -> bytes | None:
        """Returns a message that has already arrived, else None."""
        ...

    def wait(self) -> bytes:
        """Blocks until the next message and returns it."""
        ...

    def reply(self, message: bytes) -> None:
        """Sends a message to the engine."""
        ...


class QueueEndpoint:
    """The worker's endpoint over two in-process queues."""

    def __init__(self) -> None:
        self.incoming: MessageQueue = queue.SimpleQueue()
        self.outgoing: MessageQueue = queue.SimpleQueue()

    def poll(self) -> bytes | None:
        return None if self.incoming.empty() else self.wait()

    def wait(self) -> bytes:
        message = self.incoming.get()
        if message is None:
            self.incoming.put(None)  # later calls raise as well
            raise EngineClosed
        return message

    def reply(self, message: bytes) -> None:
        self.outgoing.put(message)


class ThreadTransport:
    """A worker in a thread of this process. It shares the cores and the interpreter with the engine."""

    def __init__(self, work: Callable[[WorkerEndpoint], None]) -> None:
        self._endpoint = endpoint = QueueEndpoint()

        def run() -> None:
            try:
                work(endpoint)
            finally:
                endpoint.outgoing.put(None)

        thread = threading.Thread(target=run, name="foretoken-drafting", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end_thread, endpoint, thread)

    def send(self, message: bytes) -> None:
        self._endpoint.incoming.put(message)

    def receive(self, seconds: float) -> bytes | None:
        return next_message(self._endpoint.outgoing, seconds)


class ProcessTransport:
    """A worker in a process of its own.

    Args:
        config: What the worker loads, as JSON (see ``remote.worker_config``).

    Raises:
        InvalidRequest: The system is not POSIX.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if os.name != "posix":
            raise InvalidRequest("transport 'process' needs a POSIX system; take 'thread' or 'ray' here")
        own, remote = socket.socketpair()
        with remote:
            command = [sys.executable, "-P", "-m", PROGRAM, str(remote.fileno())]
            self.process = subprocess.Popen(command, pass_fds=(remote.fileno(),), stdin=subprocess.DEVNULL)
        self._connection = Connection(own.detach())
        self._messages: MessageQueue = queue.SimpleQueue()
        reader = threading.Thread(
            target=_read, args=(self._connection, self._messages), name="foretoken-drafts", daemon=True
        )
        reader.start()
        self.close = weakref.finalize(self, _end_process, self.process, self._connection, reader)
        self.send(json.dumps(dict(config)).encode())

    def send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise WorkerLost(f"the drafting process is gone ({error})") from None

    def receive(self, seconds: float) -> bytes | None:
        return next_message(self._messages, seconds)


class PipeEndpoint:
    """The worker's endpoint in a process, over the socket with file number ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def poll(self) -> bytes | None:
        try:
            return self._connection.recv_bytes() if self._connection.poll(0) else None
        except (EOFError, OSError):
            raise EngineClosed from None

    def wait(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise EngineClosed from None

    def reply(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError:
            raise EngineClosed from None


def thread_transport(config: Mapping[str, Any]) -> ThreadTransport:
    """Runs ``PROGRAM`` in a thread."""
    serve = import_module(PROGRAM).serve
    return ThreadTransport(lambda endpoint: serve(endpoint, config))


def next_message(messages: MessageQueue, seconds: float) -> bytes | None:
    """Returns the next message, or None if none arrives within ``seconds`` (0 only takes what is there).

    Raises:
        WorkerLost: The stream has ended.
    """
    try:
        message = messages.get(timeout=seconds) if seconds > 0 else messages.get_nowait()
    except queue.Empty:
        return None
    if message is None:
        messages.put(None)
        raise WorkerLost("the drafting worker is gone")
    return message


def _read(connection: Connection, messages: MessageQueue) -> None:
    """Queues incoming messages until the stream ends, so that the worker never blocks on the engine."""
    try:
        while True:
            messages.put(connection.recv_bytes())
    except (EOFError, OSError):
        messages.put(None)


def _end_thread(endpoint: QueueEndpoint, thread: threading.Thread) -> None:
    endpoint.incoming.put(None)
    if thread is not threading.current_thread():
        thread.join(_EXIT_TIMEOUT)


def _end_process(process: subprocess.Popen[bytes], connection: Connection, reader: threading.Thread) -> None:
    """Closes the worker's input, which ends the worker; its end in turn ends the reader."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shut, suppress(OSError):  # it may be gone already
        shut.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(_EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    reader.join(_EXIT_TIMEOUT)
    connection.close()
