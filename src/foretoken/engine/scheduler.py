"""Who takes part in the next round: requests join and leave between passes, long prompts piece by piece.

Order is by priority, then by arrival. Where keys and values have a bound, whoever comes last in that order is set
aside when room is short, and goes on later from the same token: nothing of it is lost but the time to read it again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from foretoken.core.context import Context
from foretoken.engine.pace import Pace
from foretoken.engine.sequence import Sequence
from foretoken.models.base import Model

BLOCK = 64  # rows that are given out at once
PIECE = 256  # rows of a prompt's piece where the cut may change a row's last bits: always the same


@dataclass(frozen=True, slots=True)
class Round:
    """ready: they are answered; the rest of their text, if any, is read in the same pass. rooms: draft nodes they may
    have. reading: of these a piece is read, and no more.
    """

    ready: list[Sequence]
    rooms: list[int]
    reading: list[Sequence]


@dataclass(frozen=True, slots=True)
class Usage:
    """What goes on. kv_tokens of kv_capacity (0 without a bound) are spoken for; of prompt tokens looked up
    (prefix_queries) so many were found computed (prefix_hits).
    """

    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    kv_capacity: int = 0
    prefix_hits: int = 0
    prefix_queries: int = 0
    preemptions: int = 0


class Scheduler:
    """See the module.

    capacity: tokens whose keys and values fit, None without a bound. join: called with a context that the target begins
    to read. -> so many of its first tokens may be left out. aside: called with a context that is set aside.
    """

    def __init__(
        self, target: Model, max_sequences: int, pace: Pace, capacity: int | None, join: Callable[[Context], int],
        aside: Callable[[Context], None],
    ) -> None:  # fmt: skip
        self.target, self.max_sequences, self.pace, self.capacity = target, max_sequences, pace, capacity
        self._join, self._aside = join, aside
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}
        self._arrivals = self._hits = self._queries = self._preemptions = 0

    @property
    def usage(self) -> Usage:
        held = sum(_blocks(len(s.context.tokens)) + _blocks(len(s.context.source)) for s in list(self.running.values()))
        capacity = self.capacity or 0
        return Usage(len(self.running), len(self.waiting), held, capacity, self._hits, self._queries, self._preemptions)

    def add(self, sequence: Sequence) -> None:
        """Put it in line."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._queue(sequence)

    def remove(self, identifier: int) -> Sequence | None:
        """Take it out wherever it is."""
        sequence = self.running.pop(identifier, None)
        if sequence is not None:
            self.target.close(sequence.handle)
            return sequence
        found = next((s for s in self.waiting if s.context.id == identifier), None)
        if found is not None:
            self.waiting.remove(found)
        return found

    def round(self) -> Round:
        """Decide the next round; sequences to be read have their pieces already."""
        self._make_room()
        in_line = sorted(self.running.values(), key=lambda s: s.turn)
        answering = sum(sequence.ready for sequence in in_line)
        left = self.pace.rows(answering)
        for sequence in in_line:
            left = self._read(sequence, left)
        while self.waiting and (left is None or left > 0) and self._admit():
            left = self._read(self._open(self.waiting.pop(0)), left)
        ready = [s for s in self.running.values() if s.ready]
        reading = [s for s in self.running.values() if not s.ready and s.handle.pending]
        return Round(ready, self._rooms(ready), reading)

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not balance."""
        slots = [sequence.handle.slot for sequence in self.running.values()]
        assert len(set(slots)) == len(slots) and min(slots, default=0) >= 0, (
            "two sequences share a place, or one is lost"
        )
        assert all(s.handle.slot < 0 for s in self.waiting), "a waiting sequence holds a place"
        for sequence in self.running.values():
            known = sequence.handle.tokens
            assert sequence.context.tokens[: len(known)] == known, "the target was given another text"
        assert self.waiting == sorted(self.waiting, key=lambda s: s.turn), "the line is out of order"
        self.target.check()

    # reading

    def _read(self, sequence: Sequence, left: int | None) -> int | None:
        """Give the target more of the sequence's text. -> rows that are left for others"""
        handle, unread = sequence.handle, sequence.unread
        if sequence.reads_aloud or (not unread and sequence.context.generated and len(handle.pending) <= 1):
            return left
        if unread and (left is None or left > 0):
            count = unread
            if not self.target.cuts_freely and left is not None:
                count = PIECE if unread > PIECE else unread
            elif left is not None:
                count = min(unread, left)
            tokens = sequence.context.tokens
            self.target.commit([handle], [tokens[len(handle.tokens) : len(handle.tokens) + count]])
        return None if left is None else left - len(handle.pending)

    def _open(self, sequence: Sequence) -> Sequence:
        """Give it a place, and as much of its text as everybody has computed already, with one token more."""
        context, tokens = sequence.context, sequence.context.tokens
        if sequence.reads_aloud:
            sequence.of_prompt.clear()
        begun = tokens[:1] if sequence.reads_aloud else tokens
        handle = sequence.handle = self.target.open(begun, context.source, context.cache_salt)
        handle.truncate(min(handle.cached, self._join(context)) + 1)
        if not sequence.counts.rounds:
            sequence.counts.started, sequence.counts.cached = monotonic(), handle.cached
        self._hits += handle.cached
        self._queries += len(tokens)
        self.running[context.id] = sequence
        return sequence

    # room

    def _admit(self) -> bool:
        """Whether the first in line may join; who comes after it in order is set aside for it."""
        first = self.waiting[0]
        last = sorted(self.running.values(), key=lambda s: s.turn, reverse=True)
        after = [s for s in last if s.priority > first.priority]
        for count in range(len(after) + 1):
            others = last[count:]
            if len(others) < self.max_sequences and self._fit([*others, first], spare=BLOCK * len(others)):
                for sequence in after[:count]:
                    self._set_aside(sequence)
                return True
        return False

    def _make_room(self) -> None:
        """Set the last ones aside until the others fit, each with a token more."""
        while len(self.running) > 1 and not self._fit(list(self.running.values())):
            self._set_aside(max(self.running.values(), key=lambda s: s.turn))

    def _fit(self, sequences: list[Sequence], spare: int = 0) -> bool:
        return self.capacity is None or len(sequences) == 1 or sum(map(_need, sequences)) + spare <= self.capacity

    def _rooms(self, ready: list[Sequence]) -> list[int]:
        """Draft nodes for each: what could be emitted, and what fits."""
        rooms = [sequence.room(self.target.max_length) for sequence in ready]
        if self.capacity is None or not ready:
            return rooms
        spare = max(0, self.capacity - sum(map(_need, self.running.values()))) // len(ready) // BLOCK * BLOCK
        texts = [len(sequence.context.tokens) + 1 for sequence in ready]
        ends = [_blocks(text) - text + spare for text in texts]
        return [min(room, end) for room, end in zip(rooms, ends, strict=True)]

    def _set_aside(self, sequence: Sequence) -> None:
        del self.running[sequence.context.id]
        self.target.close(sequence.handle)
        self._aside(sequence.context)
        self._preemptions += 1
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.turn)


def _need(sequence: Sequence) -> int:
    """Rows that the sequence holds at its next token, those of what an encoder read for it included."""
    return _blocks(len(sequence.context.tokens) + 1) + _blocks(len(sequence.context.source))


def _blocks(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK
