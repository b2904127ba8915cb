"""Runs each task in its own process, forked from one that has loaded what the tasks need. POSIX only.

Each process has a limit on processor time and memory. The kernel kills a process that exceeds it, and the other end of
its connection reads an end of file. This module must not import torch, so that the processes start quickly.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from typing import Any

_NICER = 5  # niceness of work that no decode step waits for


class ForkServer:
    """The process that tasks are forked from, started on first use and again after it died. Thread-safe.

    Args:
        program: Name of the module to run with ``-m``. Its only argument is the descriptor of its connection.
        first: Returns the first message to the process.
    """

    def __init__(self, program: str, first: Callable[[], Any]) -> None:
        self._program, self._first = program, first
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def fork(self) -> Connection:
        """Starts a task's process. Returns the connection to it."""
        with self._lock:
            if self._connection is not None and self._process is not None and self._process.poll() is None:
                try:
                    return fork(self._connection)
                except OSError:  # it has just died
                    self._process.wait()
            return fork(self._started())

    def close(self) -> None:
        """Ends the process. The processes that it forked end when their connections are closed."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            if self._process is not None:
                self._process.kill()  # it has nothing to save, and may still be importing
                self._process.wait()
            self._process = self._connection = None

    def _started(self) -> Connection:
        self._connection, child_end = Pipe()
        with child_end:
            command = [sys.executable, "-P", "-m", self._program, str(child_end.fileno())]
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # threads do not survive a fork
            self._process = subprocess.Popen(
                command, pass_fds=(child_end.fileno(),), stdin=subprocess.DEVNULL, env=environment
            )
        self._connection.send(self._first())
        return self._connection


def fork(connection: Connection) -> Connection:
    """Makes the process at the other end fork. Returns the connection to its child."""
    parent_end, child_end = Pipe()
    with child_end:
        reduction.send_handle(connection, child_end.fileno(), None)
    return parent_end


def ask(connection: Connection, question: Any, seconds: float, *, pickled: bool = False) -> Any:
    """Returns the reply, bytes or a pickled object; None if the process is dead or takes longer than ``seconds``."""
    try:
        connection.send(question)
        if connection.poll(seconds):
            return connection.recv() if pickled else connection.recv_bytes()
    except (EOFError, OSError):
        pass
    connection.close()
    return None


# in the forked processes


def first_received(descriptor: int) -> tuple[Connection, Any] | None:
    """Returns the connection to the process that started this one, and what it sent; None if it has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to the whole process group
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    connection = Connection(descriptor)
    try:
        return connection, connection.recv()
    except EOFError:
        return None


def fork_for_each(connection: Connection, serve: Callable[[Connection], None]) -> None:
    """Serves every received connection in its own process, until the other end is closed."""
    while True:
        try:
            arrived = reduction.recv_handle(connection)
        except (EOFError, OSError):
            return
        try:
            child = os.fork()
        except OSError:  # too many processes: the other end of this connection reads an end of file
            child = -1
        if child == 0:
            connection.close()
            try:
                serve(Connection(arrived))
            finally:
                os._exit(0)
        os.close(arrived)


def allow_seconds(seconds: float) -> None:
    """Makes the kernel end this process after ``seconds`` of processor time from now. 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_memory(memory_bytes: int) -> None:
    """Limits the memory of processes forked from here, and disables their core dumps.

    memory_bytes: Memory in addition to what this process has.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as pages:
            limit = int(pages.read().split()[0]) * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def nicely(work: Callable[[], None]) -> None:
    """Runs ``work`` in a thread of lower priority, and waits for it.

    A niceness cannot be lowered without privileges. On Linux it belongs to a thread, so only this thread keeps it.
    """

    def run() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICER)
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
