"""Where the end of a text occurred before, and what came after it there.

Repeated text is found by its left context, so the structure sorts places of a text by what *precedes* them: a suffix
array of the reversed text. One binary search then lands among the places whose context agrees longest with the end of
the text at hand, and its neighbours are all the occurrences of every shorter length, nearest first. Text that still
grows is not sorted at all: one vectorised comparison passes over it (a hundred thousand tokens in some 60 us).
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from foretoken.core.context import Context

Ids = NDArray[np.int32]

BREAK = -1  # between documents, and beyond both ends of a text; no token equals it
PAD = 64  # breaks that are kept beyond the ends, so that no window has to be cut
LIMIT = 32  # occurrences that are worth counting


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Places whose context agrees with the end of a text, the longest agreement first, then the latest.

    lengths: int [K], how many tokens before the place agree, at least 1 and at most those searched with.
    following: int [K, steps], the tokens after each place; ``BREAK`` from the end of its document on.
    """

    lengths: NDArray[np.int64]
    following: Ids

    @staticmethod
    def none() -> Occurrences:
        return _NONE

    @staticmethod
    def best(parts: Iterable[Occurrences], limit: int) -> Occurrences:
        """The ``limit`` longest of several texts' occurrences; among equals those of earlier parts come first."""
        some = [part for part in parts if len(part.lengths)]
        if len(some) < 2:
            return some[0] if some else _NONE
        lengths = np.concatenate([part.lengths for part in some])
        first = np.argsort(-lengths, kind="stable")[:limit]
        return Occurrences(lengths[first], np.concatenate([part.following for part in some])[first])


_NONE = Occurrences(np.empty(0, np.int64), np.empty((0, 0), np.int32))


class Text(Protocol):
    """Text that can be searched for occurrences."""

    def __len__(self) -> int:
        """Tokens, the breaks between documents included."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory (or mapped file) that it takes."""
        ...

    def tokens(self) -> Ids:
        """[N], with ``BREAK`` between documents."""
        ...

    def occurrences(self, tail: Ids, steps: int, limit: int = LIMIT, least: int = 1) -> Occurrences:
        """Of the end of ``tail`` [M], with ``steps`` tokens after each; both at most ``PAD``.

        Counts over them are exact for every length at which at most ``limit`` places agree. Where more do, those
        with the longest agreement (and, in growing text, the latest) stand for all. ``least``: of agreement; cheap
        to miss.
        """
        ...


class GrowingText:
    """Text that is appended to and searched by comparing all of it.

    periodic: what follows a place near the end runs on into its own copy, as text that repeats itself does.
    """

    def __init__(self, periodic: bool = False) -> None:
        self.periodic = periodic
        self._buffer: Ids = np.full(4 * PAD, BREAK, np.int32)  # PAD breaks, the text, at least PAD breaks
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def tokens(self) -> Ids:
        return self._buffer[PAD : PAD + self._count]

    def tail(self, count: int) -> Ids:
        """The last tokens, at most ``count``."""
        end = PAD + self._count
        return self._buffer[max(PAD, end - count) : end]

    def extend(self, tokens: Sequence[int] | Ids) -> None:
        start = PAD + self._count
        end = start + len(tokens)
        if end + PAD > len(self._buffer):
            grown = np.full(end + PAD + end // 2, BREAK, np.int32)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        self._buffer[start:end] = tokens
        self._count += len(tokens)

    def occurrences(self, tail: Ids, steps: int, limit: int = LIMIT, least: int = 1) -> Occurrences:
        if len(tail) < least or not self._count:
            return _NONE
        text, end = self._buffer, PAD + self._count
        places = np.flatnonzero(text[PAD : end - 1] == tail[-1]) + (PAD + 1)
        for back in range(2, len(tail) + 1):
            if len(places) <= limit:
                break
            closer = places[text[places - back] == tail[-back]]
            if not len(closer):
                break
            places = closer
        places = places[: -limit - 1 : -1]  # the latest first
        lengths = _agreement(text[places[:, None] - np.arange(1, len(tail) + 1)], tail[::-1])
        first = np.argsort(-lengths, kind="stable")
        first = first[: np.count_nonzero(lengths >= least)]
        places = places[first, None]
        ahead = np.arange(steps)
        after = places + (ahead % (end - places) if self.periodic else ahead)
        return Occurrences(lengths[first], text[np.minimum(after, end)])


class ContextTexts:
    """The live text of every sequence, brought up to date when it is asked for."""

    def __init__(self) -> None:
        self._texts: dict[int, GrowingText] = {}

    def of(self, context: Context) -> GrowingText:
        """Prompt and output so far; before them what an encoder read, behind a start like the output's, so that an
        output that copies it is known from its first token on.
        """
        text, start = self._texts.get(context.id), context.tokens[:1] if context.source else []
        if text is None:
            text = self._texts[context.id] = GrowingText(periodic=True)
            text.extend([*start, *context.source])
        text.extend(context.tokens[len(text) - len(start) - len(context.source) :])
        return text

    def forget(self, context: Context) -> None:
        self._texts.pop(context.id, None)


class SortedText:
    """Text that no longer changes, with its places in the order of their contexts; in memory or mapped from files.

    text: the reversed tokens and PAD breaks, as big-endian integers of ``width`` bytes (2 or 4), so that comparing
    bytes compares contexts. order: int32 [N], places in the order of their contexts; place r lies before reversed[r].
    """

    def __init__(self, text: bytes | mmap.mmap, order: NDArray[np.int32], width: int) -> None:
        self._text, self._order, self.width = text, order, width
        self._sorted = order.data  # gives Python integers, which bisect asks for one at a time
        self._raw: NDArray[Any] = np.frombuffer(text, f"=u{width}")  # bytes swapped: good for equality

    @classmethod
    def build(cls, tokens: Ids, depth: int) -> SortedText:
        """Sorts ``tokens`` [N] by contexts of ``depth`` tokens at least, in some 0.5 us a token and 40 bytes each."""
        largest = int(tokens.max(initial=0))
        width = 2 if largest < 2**16 - 1 else 4
        backward = np.full(len(tokens) + PAD, BREAK, np.int32)
        backward[: len(tokens)] = tokens[::-1]
        ranked = np.where(backward == BREAK, largest + 1, backward).astype(np.uint64)  # breaks come last
        return cls(backward.astype(f">u{width}").tobytes(), sort_suffixes(ranked, len(tokens), depth), width)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def nbytes(self) -> int:
        return len(self._text) + self._order.nbytes

    @property
    def files(self) -> tuple[bytes | mmap.mmap, bytes]:
        """What to write to disk: the text and the order."""
        return self._text, self._order.astype("<i4").tobytes()

    def tokens(self) -> Ids:
        return self._ids(self._raw[: len(self)][::-1])

    def longest(self, tail: Ids) -> int:
        """The longest agreement, in a fraction of the time that ``occurrences`` takes."""
        wanted = self._pattern(tail).tobytes()
        return self._locate(wanted)[1]

    def occurrences(self, tail: Ids, steps: int, limit: int = LIMIT, least: int = 1) -> Occurrences:
        pattern = self._pattern(tail)
        at, longest = self._locate(pattern.tobytes())
        if longest < least:
            return _NONE
        places = self._order[max(0, at - limit) : at + limit].astype(np.int64)
        contexts = self._raw[places[:, None] + np.arange(len(pattern))]
        lengths = _agreement(contexts, pattern.view(f"=u{self.width}"))
        first = np.argsort(-lengths, kind="stable")[:limit]
        first = first[: np.count_nonzero(lengths >= least)]
        # An index before the first token counts from the end, where the breaks are.
        after = self._raw[places[first, None] - np.arange(1, steps + 1)]
        return Occurrences(lengths[first], self._ids(after))

    def _pattern(self, tail: Ids) -> NDArray[Any]:
        """The tail backwards, as ``text`` has it, as far as this text can hold its tokens."""
        if self.width == 2 and tail.max(initial=0) >= 2**16 - 1:
            tail = tail[np.flatnonzero(tail >= 2**16 - 1)[-1] + 1 :]
        return tail[::-1].astype(f">u{self.width}")

    def _locate(self, wanted: bytes) -> tuple[int, int]:
        """Where a context belongs in the order, and how many tokens agree with the nearer neighbour."""
        text, width, size = self._text, self.width, len(wanted)
        at = bisect_left(self._sorted, wanted, key=lambda r: text[r * width : r * width + size])
        number = int.from_bytes(wanted)
        different = min(
            (
                number ^ int.from_bytes(text[r * width : r * width + size])
                for r in self._sorted[max(0, at - 1) : at + 1]
            ),
            default=1 << (8 * size),
        )
        return at, max(0, 8 * size - different.bit_length()) // (8 * width)  # equal leading bits, in tokens

    def _ids(self, raw: NDArray[Any]) -> Ids:
        """Tokens from swapped bytes, in which the largest number is a break."""
        ids = raw.byteswap().astype(np.int32)
        if self.width == 2:
            ids[ids == 2**16 - 1] = BREAK
        return ids


def sort_suffixes(ids: NDArray[np.uint64], count: int, depth: int) -> NDArray[np.int32]:
    """The first ``count`` places of ``ids`` in the order of the ``depth`` tokens (or more) from each on.

    Prefix doubling (Manber and Myers): first by as many tokens as fit a 64-bit key, then by pairs of ranks twice
    as far apart each time, and only where places are not told apart yet. ``ids`` goes on beyond ``count`` by PAD.
    """
    bits = int(ids.max(initial=1)).bit_length()
    compared = 64 // bits
    key = np.zeros(count, np.uint64)
    for ahead in range(compared):
        key = (key << np.uint64(bits)) | ids[ahead : ahead + count]
    order = np.argsort(key).astype(np.int32)
    rank = np.full(count + 1, count, np.int32)  # the end counts as breaks, which come last
    slots = np.arange(count)
    _regroup(order, key[order], slots, rank)
    slots = _undecided(rank[order], slots)
    while compared < depth and len(slots):
        places = order[slots]
        pairs = rank[places].astype(np.int64) * (count + 1) + rank[np.minimum(places + compared, count)]
        by = np.argsort(pairs)
        order[slots] = places = places[by]
        _regroup(places, pairs[by], slots, rank)
        slots = _undecided(rank[places], slots)
        compared *= 2
    return order


def _regroup(places: NDArray[np.int32], keys: NDArray[Any], slots: NDArray[np.int64], rank: NDArray[np.int32]) -> None:
    """Give places with equal keys the first of their slots as rank."""
    starts = np.zeros(len(slots), np.int64)
    starts[1:] = np.where(keys[1:] != keys[:-1], np.arange(1, len(slots)), 0)
    rank[places] = slots[np.maximum.accumulate(starts)]


def _undecided(ranks: NDArray[np.int32], slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """The slots that share their rank with a neighbour."""
    same = ranks[1:] == ranks[:-1]
    shared = np.zeros(len(slots), bool)
    shared[1:] |= same
    shared[:-1] |= same
    return slots[shared]


def _agreement(contexts: NDArray[Any], wanted: NDArray[Any]) -> NDArray[np.int64]:
    """How many leading tokens of each row [K, M] equal ``wanted`` [M]. -> [K]"""
    equal = np.zeros((len(contexts), len(wanted) + 1), bool)  # the last column ends every agreement
    np.equal(contexts, wanted, out=equal[:, :-1])
    return equal.argmin(1)
