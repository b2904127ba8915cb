"""Grammars in separate processes, so that a hostile grammar fails its own request and nothing else.

A grammar of a hundred characters can keep llguidance busy for minutes or overflow its stack, and a thread cannot be
stopped. So one process holds the vocabulary and forks one process for each grammar, which compiles it and forks one
process for each sequence that follows it. See ``core.forking``.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.core.forking import (
    ForkServer,
    allow_seconds,
    ask,
    first_received,
    fork,
    fork_for_each,
    limit_memory,
    nicely,
)
from foretoken.engine.matching import GrammarVocabulary, LocalGrammar, MatcherFollower, refusal

_TIMEOUT = 30.0  # seconds to wait for a reply; the kernel's limit on processor time takes effect much earlier

_OK, _REFUSED, _MASK, _NO_MASK = b"o", b"r", b"m", b"n"


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of a grammar. Seconds are processor time."""

    compile_seconds: float = 3.0  # for compiling
    mask_seconds: float = 0.5  # for computing one mask
    text_seconds: float = 1.0  # for all masks of a text
    token_seconds: float = 0.05  # added to ``text_seconds`` with every token of the text
    memory_bytes: int = 2**29  # memory in addition to the vocabulary


class GrammarServer:
    """The process that holds a vocabulary. It is started on first use. Thread-safe."""

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary], limits: GrammarLimits | None = None) -> None:
        self._limits = limits or GrammarLimits()
        self.process = ForkServer("foretoken.engine.grammar_process", lambda: (vocabulary(), self._limits))

    def compile(self, spec: Mapping[str, Any]) -> "ForkedGrammar":
        """Compiles a grammar in its own process. Raises InvalidRequest."""
        connection = self.process.fork()
        reply = ask(connection, spec, _TIMEOUT)
        if reply is None:
            raise refusal(
                f"structured_outputs cannot be compiled within {self._limits.compile_seconds:g} s and "
                f"{self._limits.memory_bytes >> 20} MiB, or are nested too deeply; make the grammar smaller"
            )
        if reply[:1] == _REFUSED:
            raise refusal(reply[1:].decode())
        return ForkedGrammar(connection, int(reply[1:]), self._limits)

    def close(self) -> None:
        """Ends the process. The processes that it forked end when their grammars are no longer referenced."""
        self.process.close()


class ForkedGrammar:
    """A ``CompiledGrammar`` in its own process. memory_bytes: memory of that process."""

    def __init__(self, connection: Connection, memory_bytes: int, limits: GrammarLimits) -> None:
        self._connection, self.memory_bytes, self._limits = connection, memory_bytes, limits

    @property
    def alive(self) -> bool:
        """See ``CompiledGrammar``. The process sends replies only, so anything to read is an end of file."""
        return not self._connection.poll()

    def follower(self) -> "ProcessFollower":
        """See ``CompiledGrammar``. The follower's process is forked on its first use."""
        return ProcessFollower(self._connection, self._limits)


class ProcessFollower:
    """A ``GrammarFollower`` in its own process."""

    def __init__(self, grammar: Connection, limits: GrammarLimits) -> None:
        self._grammar, self._limits = grammar, limits
        self._connection: Connection | None = None
        self._reset, self._fresh = False, list[int]()

    def reset(self) -> None:
        self._reset = True
        self._fresh.clear()

    def extend(self, tokens: Sequence[int]) -> None:
        self._fresh += tokens

    def allowed(self, path: Sequence[int]) -> bytes | None:
        try:
            if self._connection is None:
                self._connection = fork(self._grammar)
            reply = ask(self._connection, (self._reset, self._fresh, tuple(path)), _TIMEOUT)
        except OSError:  # the grammar's process is dead
            reply = None
        if reply is None:
            raise _too_slow(self._limits)
        self._reset, self._fresh = False, []
        if reply[:1] == _REFUSED:
            raise refusal(reply[1:].decode())
        return reply[1:] if reply[:1] == _MASK else None


# in the forked processes


def main(descriptor: int) -> None:
    """Receives the vocabulary, then forks for every grammar until the other end is closed."""
    received = first_received(descriptor)
    if received is None:
        return
    connection, (vocabulary, limits) = received
    tokenizer = vocabulary.load()
    limit_memory(limits.memory_bytes)
    before = _memory()

    def serve(connection: Connection) -> None:
        spec = connection.recv()
        compiled: list[LocalGrammar | InvalidRequest] = []

        def compile_spec() -> None:
            try:
                compiled.append(_followable(LocalGrammar(tokenizer, spec), limits))
            except InvalidRequest as error:
                compiled.append(error)

        allow_seconds(limits.compile_seconds)
        nicely(compile_spec)  # decode steps wait for masks, but not for compiling
        allow_seconds(0.0)
        grammar = compiled[0]
        if isinstance(grammar, InvalidRequest):
            connection.send_bytes(_REFUSED + str(grammar).encode())
            return
        connection.send_bytes(_OK + str(max(0, _memory() - before)).encode())
        fork_for_each(connection, lambda connection: _follow(connection, grammar.follower(), limits))

    fork_for_each(connection, serve)


def _followable(grammar: LocalGrammar, limits: GrammarLimits) -> LocalGrammar:
    """Returns the grammar. Raises InvalidRequest if its first mask takes too long, before a step waits for it."""
    started = time.thread_time()
    grammar.follower().allowed(())
    if time.thread_time() - started > limits.mask_seconds:
        raise _too_slow(limits)
    return grammar


def _too_slow(limits: GrammarLimits) -> InvalidRequest:
    return refusal(
        f"structured_outputs cannot be followed any further: it takes more than {limits.mask_seconds:g} s to find the "
        f"next tokens, {limits.token_seconds:g} s on average or {limits.memory_bytes >> 20} MiB; make the grammar "
        "simpler"
    )


def _follow(connection: Connection, follower: MatcherFollower, limits: GrammarLimits) -> None:
    """Computes masks of one text until the other end is closed."""
    started, tokens = time.process_time(), 0
    while True:
        try:
            reset, fresh, path = connection.recv()
        except (EOFError, OSError):
            return
        tokens += len(fresh)
        allow_seconds(limits.mask_seconds)
        try:
            if reset:
                follower.reset()
            follower.extend(fresh)
            mask = follower.allowed(path)
            reply = _NO_MASK if mask is None else _MASK + mask
        except InvalidRequest as error:
            reply = _REFUSED + str(error).encode()
        allow_seconds(0.0)
        if time.process_time() - started > limits.text_seconds + limits.token_seconds * tokens:
            return
        connection.send_bytes(reply)


def _memory() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main(int(sys.argv[1]))
