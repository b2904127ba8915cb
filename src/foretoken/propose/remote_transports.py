"""Connections between an engine and a drafting worker: a thread, a process on this machine, or a Ray actor.

Messages are bytes and arrive in order, in both directions. The worker runs ``PROGRAM``, which is imported by name: it
builds proposers, so it is above them in the import order.
"""

import logging
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
from multiprocessing.connection import Connection, Pipe
from typing import Any

from foretoken.core.errors import ForetokenError, InvalidRequest

PROGRAM = "foretoken.engine.drafting"
_EXIT_TIMEOUT = 5.0  # seconds to wait for a worker to end; a process is then killed

MessageQueue = queue.SimpleQueue[bytes | None]  # None marks the end of the stream


class Disconnected(ForetokenError):
    """The other side of a connection has ended or does not answer."""


class DraftEndpoint:
    """One side of a connection.

    Args:
        send: Sends a message without waiting until it is read. Any exception means that the other side has ended.
        incoming: Queue of received messages.
    """

    def __init__(self, send: Callable[[bytes], object], incoming: MessageQueue) -> None:
        self._send, self._incoming = send, incoming

    def send(self, message: bytes) -> None:
        try:
            self._send(message)
        except Exception as error:  # Ray raises many types
            raise Disconnected(f"the drafting worker is gone ({_first_line(error)})") from None

    def receive(self, seconds: float | None = None) -> bytes | None:
        """Returns the next message, or None if none arrives within ``seconds``. None waits without a limit.

        Raises Disconnected if the other side has ended.
        """
        try:
            message = self._incoming.get(timeout=seconds)
        except queue.Empty:
            return None
        if message is None:
            self._incoming.put(None)  # later calls raise as well
            raise Disconnected("the drafting worker is gone")
        return message


class EngineEndpoint(DraftEndpoint):
    """The engine's side of a connection.

    Args:
        send: See ``DraftEndpoint``.
        incoming: See ``DraftEndpoint``.
        worker: The thread, process or Ray actor.
        end: Ends the worker.

    Attributes:
        close: Ends the worker, as deleting this object does. A second call does nothing.
    """

    def __init__(
        self, send: Callable[[bytes], object], incoming: MessageQueue, worker: Any, end: Callable[[], None]
    ) -> None:
        super().__init__(send, incoming)
        self.worker = worker
        self.close = weakref.finalize(self, end)


class PipeEndpoint(DraftEndpoint):
    """The worker's side in a process, over the socket with file number ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)
        super().__init__(self._connection.send_bytes, queue.SimpleQueue())

    def receive(self, seconds: float | None = None) -> bytes | None:
        try:
            return self._connection.recv_bytes() if self._connection.poll(seconds) else None
        except (EOFError, OSError):
            raise Disconnected("the engine is gone") from None


class ActorHost:
    """A drafting worker as a Ray actor, in a thread of the actor's process."""

    def __init__(self) -> None:
        self._endpoint = start_thread(import_module(PROGRAM).serve)

    def send(self, message: bytes) -> None:
        self._endpoint.send(message)

    def receive(self) -> bytes | None:
        """Waits for the worker's next message and returns it; None if the worker has ended."""
        try:
            return self._endpoint.receive()
        except Disconnected:
            return None


def start_thread(work: Callable[[DraftEndpoint], None]) -> EngineEndpoint:
    """Runs ``work`` in a thread of this process, which shares the cores and the interpreter with the engine."""
    to_worker: MessageQueue = queue.SimpleQueue()
    to_engine: MessageQueue = queue.SimpleQueue()

    def run() -> None:
        try:
            work(DraftEndpoint(to_engine.put, to_worker))
        finally:
            to_engine.put(None)

    def end() -> None:
        to_worker.put(None)
        if thread is not threading.current_thread():
            thread.join(_EXIT_TIMEOUT)

    thread = threading.Thread(target=run, name="foretoken-drafting", daemon=True)
    thread.start()
    return EngineEndpoint(to_worker.put, to_engine, thread, end)


def start_process() -> EngineEndpoint:
    """Runs ``PROGRAM`` in a process of its own. Raises InvalidRequest if the system is not POSIX."""
    if os.name != "posix":
        raise InvalidRequest("transport 'process' needs a POSIX system; use 'thread' or 'ray' here")
    connection, remote = Pipe()
    with remote:
        command = [sys.executable, "-P", "-m", PROGRAM, str(remote.fileno())]
        process = subprocess.Popen(command, pass_fds=(remote.fileno(),), stdin=subprocess.DEVNULL)
    messages, reader = _read_in_thread(connection.recv_bytes)

    def end() -> None:
        """Closes the worker's input, which ends the worker; its end in turn ends the reader."""
        with socket.socket(fileno=os.dup(connection.fileno())) as shut, suppress(OSError):  # may be closed already
            shut.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(_EXIT_TIMEOUT)
        connection.close()

    return EngineEndpoint(connection.send_bytes, messages, process, end)


def start_actor(address: str | None, resources: Mapping[str, float] | None) -> EngineEndpoint:
    """Runs ``PROGRAM`` in a Ray actor, on this machine or on another node of a cluster.

    Each direction has a concurrency group, in order: a message to the worker never waits for a draft.
    """
    ray = _connected_ray(address)
    remaining = dict(resources or {})
    options = {"num_cpus": remaining.pop("CPU", 1.0), "num_gpus": remaining.pop("GPU", 0.0), "resources": remaining}
    actor = ray.remote(concurrency_groups={"in": 1, "out": 1})(ActorHost).options(**options).remote()
    send, receive = actor.send.options(concurrency_group="in"), actor.receive.options(concurrency_group="out")
    messages, reader = _read_in_thread(lambda: ray.get(receive.remote()))

    def end() -> None:
        if ray.is_initialized():
            ray.kill(actor)
        reader.join(_EXIT_TIMEOUT)

    return EngineEndpoint(send.remote, messages, actor, end)


def _connected_ray(address: str | None) -> Any:
    """Returns the ``ray`` module, connected. A cluster that this starts listens on this machine only."""
    try:
        import ray
    except ImportError as error:
        raise InvalidRequest("transport 'ray' needs Ray; pip install 'foretoken[ray]'") from error
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        local: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "include_dashboard": False} if address is None else {}
        try:
            ray.init(address=address or "local", logging_level=logging.WARNING, **local)
        except Exception as error:  # Ray has no dedicated exception type for this
            problem = "no Ray could be started" if address is None else f"no Ray cluster answers at {address!r}"
            raise InvalidRequest(f"{problem}: {_first_line(error)}") from None
    return ray


def _read_in_thread(receive: Callable[[], bytes | None]) -> tuple[MessageQueue, threading.Thread]:
    """Queues incoming messages until the stream ends, so that the worker never blocks on the engine."""
    messages: MessageQueue = queue.SimpleQueue()

    def read() -> None:
        with suppress(Exception):  # EOFError, OSError, and any error of Ray end the stream
            while (message := receive()) is not None:
                messages.put(message)
        messages.put(None)

    reader = threading.Thread(target=read, name="foretoken-drafts", daemon=True)
    reader.start()
    return messages, reader


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
