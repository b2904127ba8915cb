"""Grammars in processes of their own, so that a hostile one costs its own request and nothing else.

A grammar of a hundred characters can keep llguidance busy for minutes or overflow its stack, and a thread cannot be
stopped. So one process holds the vocabulary and forks: one process for each grammar, which compiles it, and from there
one for each sequence that follows it. Each has a limit on processor time and memory; one that exceeds it is killed by
the kernel, and whoever waits for it reads an end of file. POSIX only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.engine.matching import LocalGrammar, MatcherFollower, Vocabulary

_PATIENCE = 30.0  # seconds that a process may take in all; the kernel's clock stops it long before

_PROGRAM = "foretoken.engine.grammar_process"
_OK, _REFUSED, _MASK, _NO_MASK = b"o", b"r", b"m", b"n"


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What a grammar may take. Seconds are of processor time.

    Args:
        compile_seconds: for compiling.
        mask_seconds: for finding the tokens that can come at one place.
        text_seconds: for all places of a text.
        token_seconds: that are added to ``text_seconds`` with every token of the text.
        memory_bytes: beside the vocabulary.
    """

    compile_seconds: float = 3.0
    mask_seconds: float = 0.5
    text_seconds: float = 1.0
    token_seconds: float = 0.05
    memory_bytes: int = 2**29


class GrammarServer:
    """The process that holds a vocabulary. It is started when it is first needed. Safe for threads."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: GrammarLimits | None = None) -> None:
        self._vocabulary, self._limits = vocabulary, limits or GrammarLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def compile(self, wanted: Mapping[str, Any]) -> ForkedGrammar:
        """Compile a grammar in a process of its own. Raises InvalidRequest."""
        with self._lock:
            connection = self._forked()
        reply = _ask(connection, wanted)
        if reply is None:
            raise InvalidRequest(
                f"structured_outputs cannot be compiled within {self._limits.compile_seconds:g} s and "
                f"{self._limits.memory_bytes >> 20} MiB, or are nested too deeply; make the grammar smaller"
            )
        if reply[:1] == _REFUSED:
            raise InvalidRequest(reply[1:].decode())
        return ForkedGrammar(connection, int(reply[1:]), self._limits)

    def close(self) -> None:
        """End the process; those that it forked end when nobody holds their grammars any more."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            if self._process is not None:
                self._process.wait()
            self._process = self._connection = None

    def _forked(self) -> Connection:
        if self._process is None or self._process.poll() is not None or self._connection is None:
            self._connection, there = Pipe()
            with there:
                command = [sys.executable, "-P", "-m", _PROGRAM, str(there.fileno())]
                self._process = subprocess.Popen(command, pass_fds=(there.fileno(),), stdin=subprocess.DEVNULL)
            self._connection.send((self._vocabulary(), self._limits))
        return _fork(self._connection)


class ForkedGrammar:
    """A ``CompiledGrammar`` in a process of its own. memory_bytes: what that process holds."""

    def __init__(self, connection: Connection, memory_bytes: int, limits: GrammarLimits) -> None:
        self._connection, self.memory_bytes, self._limits = connection, memory_bytes, limits

    @property
    def alive(self) -> bool:
        """See ``CompiledGrammar``. The process says nothing unasked, so all there can be to read is an end of file."""
        return not self._connection.poll()

    def follower(self) -> ProcessFollower:
        """See ``CompiledGrammar``. The follower's process is forked when it is first asked."""
        return ProcessFollower(self._connection, self._limits)


class ProcessFollower:
    """A ``Follower`` in a process of its own."""

    def __init__(self, grammar: Connection, limits: GrammarLimits) -> None:
        self._grammar, self._limits = grammar, limits
        self._connection: Connection | None = None
        self._reset, self._fresh = False, list[int]()

    def reset(self) -> None:
        """See ``Follower``."""
        self._reset = True
        self._fresh.clear()

    def extend(self, tokens: Sequence[int]) -> None:
        """See ``Follower``."""
        self._fresh += tokens

    def allowed(self, path: Sequence[int]) -> bytes | None:
        """See ``Follower``."""
        try:
            if self._connection is None:
                self._connection = _fork(self._grammar)
            reply = _ask(self._connection, (self._reset, self._fresh, tuple(path)))
        except OSError:  # the grammar's own process is dead
            reply = None
        if reply is None:
            raise InvalidRequest(
                "structured_outputs cannot be followed any further: it takes more than "
                f"{self._limits.mask_seconds:g} s to find the next tokens, {self._limits.token_seconds:g} s on average "
                f"or {self._limits.memory_bytes >> 20} MiB; make the grammar simpler"
            )
        self._reset, self._fresh = False, []
        if reply[:1] == _REFUSED:
            raise InvalidRequest(reply[1:].decode())
        return reply[1:] if reply[:1] == _MASK else None


def _fork(connection: Connection) -> Connection:
    """Have the process at the other end fork. Returns the connection to its child."""
    here, there = Pipe()
    with there:
        reduction.send_handle(connection, there.fileno(), None)
    return here


def _ask(connection: Connection, question: Any) -> bytes | None:
    """Returns the answer; None where the process is dead, now or from an earlier question on."""
    try:
        connection.send(question)
        if connection.poll(_PATIENCE):
            return connection.recv_bytes()
    except (EOFError, OSError):
        pass
    connection.close()
    return None


# the processes' side


def main(descriptor: int) -> None:
    """Read the vocabulary, then fork for every grammar until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    connection = Connection(descriptor)
    try:
        vocabulary, limits = connection.recv()
    except EOFError:
        return
    tokenizer = vocabulary.load()
    _limit_memory(limits.memory_bytes)
    before = _memory()

    def serve(connection: Connection) -> None:
        wanted = connection.recv()
        _allow(limits.compile_seconds)
        try:
            grammar = LocalGrammar(tokenizer, wanted)
        except InvalidRequest as error:
            connection.send_bytes(_REFUSED + str(error).encode())
            return
        _allow(0.0)
        connection.send_bytes(_OK + str(max(0, _memory() - before)).encode())
        _fork_for_each(connection, lambda connection: _follow(connection, grammar.follower(), limits))

    _fork_for_each(connection, serve)


def _fork_for_each(connection: Connection, serve: Callable[[Connection], None]) -> None:
    """Serve every connection that arrives in a process of its own."""
    while True:
        try:
            arrived = reduction.recv_handle(connection)
        except (EOFError, OSError):
            return
        try:
            child = os.fork()
        except OSError:  # too many processes: whoever waits for this one reads an end of file
            child = -1
        if child == 0:
            connection.close()
            try:
                serve(Connection(arrived))
            finally:
                os._exit(0)
        os.close(arrived)


def _follow(connection: Connection, follower: MatcherFollower, limits: GrammarLimits) -> None:
    """Answer for one text until the other end is closed."""
    begun, tokens = time.process_time(), 0
    while True:
        try:
            reset, fresh, path = connection.recv()
        except (EOFError, OSError):
            return
        tokens += len(fresh)
        _allow(limits.mask_seconds)
        try:
            if reset:
                follower.reset()
            follower.extend(fresh)
            mask = follower.allowed(path)
            reply = _NO_MASK if mask is None else _MASK + mask
        except InvalidRequest as error:
            reply = _REFUSED + str(error).encode()
        _allow(0.0)
        if time.process_time() - begun > limits.text_seconds + limits.token_seconds * tokens:
            return
        connection.send_bytes(reply)


def _allow(seconds: float) -> None:
    """Have the kernel end this process after so many seconds of processor time from now; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(memory_bytes: int) -> None:
    """Bound the memory of the processes that are forked from here, and have them die without a core dump."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as pages:
            most = int(pages.read().split()[0]) * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _memory() -> int:
    """The bytes that this process has held at most."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main(int(sys.argv[1]))
