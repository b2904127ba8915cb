"""Finds earlier occurrences of the end of a text, and the tokens that followed them.

Repeated text is found by its left context, so the index sorts the positions of a text by the tokens that *precede*
them: a suffix array of the reversed text. A binary search finds the positions whose context agrees longest with the end
of the current text; the neighbours in the array are all occurrences of every shorter length, nearest first. Text that
still grows is not sorted: one vectorized comparison scans it (100,000 tokens in about 60 us).
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

BREAK = -1  # separates documents and pads both ends of a text; equals no token
PAD = 64  # breaks beyond each end, so that no window has to be clipped
LIMIT = 32  # maximum number of occurrences that are counted


@dataclass(frozen=True, slots=True)
class Matches:
    """Positions whose context agrees with the end of a text, longest agreement first, then the latest.

    Attributes:
        lengths: int [K], number of tokens before the position that agree, from 1 to the length of the search pattern.
        following: int [K, steps], the tokens after each position; ``BREAK`` from the end of its document on.
    """

    lengths: NDArray[np.int64]
    following: Ids

    @staticmethod
    def none() -> Matches:
        """Returns no matches."""
        return _NONE

    @staticmethod
    def best(parts: Iterable[Matches], limit: int) -> Matches:
        """Returns the ``limit`` longest matches of several texts. On equal lengths earlier parts come first."""
        nonempty = [part for part in parts if len(part.lengths)]
        if len(nonempty) < 2:
            return nonempty[0] if nonempty else _NONE
        lengths = np.concatenate([part.lengths for part in nonempty])
        first = np.argsort(-lengths, kind="stable")[:limit]
        return Matches(lengths[first], np.concatenate([part.following for part in nonempty])[first])


_NONE = Matches(np.empty(0, np.int64), np.empty((0, 0), np.int32))


class SearchableText(Protocol):
    """Text that can be searched for matches."""

    def __len__(self) -> int:
        """Returns the number of tokens, including the breaks between documents."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory (or of mapped files)."""
        ...

    def tokens(self) -> Ids:
        """Returns the tokens, int32 [N], with ``BREAK`` between documents."""
        ...

    def find_matches(self, tail: Ids, steps: int, limit: int = LIMIT, min_length: int = 1) -> Matches:
        """Returns occurrences of the end of ``tail``.

        Counts are exact for every length at which at most ``limit`` positions agree. Beyond that, the positions with
        the longest agreement (in growing text, the latest) represent all.

        Args:
            tail: int32 [M], the end of the current text, M <= ``PAD``.
            steps: Number of tokens to return after each position, at most ``PAD``.
            limit: Maximum number of matches.
            min_length: Minimum agreement; a search without such a match is cheap.
        """
        ...


class GrowingText:
    """Text that is appended to, and searched by a scan.

    Args:
        periodic: The continuation of a position near the end wraps around into its own copy, as in text that repeats
            itself.
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
        """Returns the last tokens, at most ``count``."""
        end = PAD + self._count
        return self._buffer[max(PAD, end - count) : end]

    def extend(self, tokens: Sequence[int] | Ids) -> None:
        """Appends tokens."""
        start = PAD + self._count
        end = start + len(tokens)
        if end + PAD > len(self._buffer):
            grown = np.full(end + PAD + end // 2, BREAK, np.int32)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        self._buffer[start:end] = tokens
        self._count += len(tokens)

    def find_matches(self, tail: Ids, steps: int, limit: int = LIMIT, min_length: int = 1) -> Matches:
        if len(tail) < min_length or not self._count:
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
        first = first[: np.count_nonzero(lengths >= min_length)]
        places = places[first, None]
        ahead = np.arange(steps)
        after = places + (ahead % (end - places) if self.periodic else ahead)
        return Matches(lengths[first], text[np.minimum(after, end)])


class ContextTexts:
    """The text of every active sequence, updated when it is requested."""

    def __init__(self) -> None:
        self._texts: dict[int, GrowingText] = {}

    def of(self, context: Context) -> GrowingText:
        """Returns prompt and output so far.

        In an encoder-decoder the source precedes them, after the output's start token, so that an output that copies
        its source matches from its first token on.
        """
        text, start = self._texts.get(context.id), context.tokens[:1] if context.source else []
        if text is None:
            text = self._texts[context.id] = GrowingText(periodic=True)
            text.extend([*start, *context.source])
        text.extend(context.tokens[len(text) - len(start) - len(context.source) :])
        return text

    def forget(self, context: Context) -> None:
        """Drops the text of a finished sequence."""
        self._texts.pop(context.id, None)


class SuffixArray:
    """Immutable text with its positions sorted by context, in memory or mapped from files.

    Args:
        text: The reversed tokens and PAD breaks, as big-endian integers of ``width`` bytes, so that comparing bytes
            compares contexts.
        order: int32 [N], positions sorted by context. Position r lies before reversed[r].
        width: Bytes of a token, 2 or 4.
    """

    def __init__(self, text: bytes | mmap.mmap, order: NDArray[np.int32], width: int) -> None:
        self._text, self._order, self.width = text, order, width
        self._sorted = order.data  # yields Python integers, as bisect needs them
        self._raw: NDArray[Any] = np.frombuffer(text, f"=u{width}")  # byte order swapped: enough for equality

    @classmethod
    def build(cls, tokens: Ids, depth: int) -> SuffixArray:
        """Sorts ``tokens`` [N] by contexts of at least ``depth`` tokens, in about 0.5 us and 40 bytes of memory a
        token.
        """
        largest = int(tokens.max(initial=0))
        width = 2 if largest < 2**16 - 1 else 4
        backward = np.full(len(tokens) + PAD, BREAK, np.int32)
        backward[: len(tokens)] = tokens[::-1]
        ranked = np.where(backward == BREAK, largest + 1, backward).astype(np.uint64)  # breaks sort last
        return cls(backward.astype(f">u{width}").tobytes(), sort_suffixes(ranked, len(tokens), depth), width)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def nbytes(self) -> int:
        return len(self._text) + self._order.nbytes

    @property
    def files(self) -> tuple[bytes | mmap.mmap, bytes]:
        """The text and the order, as written to disk."""
        return self._text, self._order.astype("<i4").tobytes()

    def tokens(self) -> Ids:
        return self._ids(self._raw[: len(self)][::-1])

    def longest(self, tail: Ids) -> int:
        """Returns the longest agreement, in a fraction of the time of ``find_matches``."""
        return self._locate(self._pattern(tail).tobytes())[1]

    def find_matches(self, tail: Ids, steps: int, limit: int = LIMIT, min_length: int = 1) -> Matches:
        pattern = self._pattern(tail)
        at, longest = self._locate(pattern.tobytes())
        if longest < min_length:
            return _NONE
        places = self._order[max(0, at - limit) : at + limit].astype(np.int64)
        contexts = self._raw[places[:, None] + np.arange(len(pattern))]
        lengths = _agreement(contexts, pattern.view(f"=u{self.width}"))
        first = np.argsort(-lengths, kind="stable")[:limit]
        first = first[: np.count_nonzero(lengths >= min_length)]
        # A negative index counts from the end, where the breaks are.
        after = self._raw[places[first, None] - np.arange(1, steps + 1)]
        return Matches(lengths[first], self._ids(after))

    def _pattern(self, tail: Ids) -> NDArray[Any]:
        """Returns the tail reversed, as in ``text``, cut to the tokens that this width can hold."""
        if self.width == 2 and tail.max(initial=0) >= 2**16 - 1:
            tail = tail[np.flatnonzero(tail >= 2**16 - 1)[-1] + 1 :]
        return tail[::-1].astype(f">u{self.width}")

    def _locate(self, pattern: bytes) -> tuple[int, int]:
        """Returns the index in the order where a context belongs, and the number of tokens that agree with the nearer
        neighbour.
        """
        text, width, size = self._text, self.width, len(pattern)
        at = bisect_left(self._sorted, pattern, key=lambda r: text[r * width : r * width + size])
        number = int.from_bytes(pattern)
        different = min(
            (
                number ^ int.from_bytes(text[r * width : r * width + size])
                for r in self._sorted[max(0, at - 1) : at + 1]
            ),
            default=1 << (8 * size),
        )
        return at, max(0, 8 * size - different.bit_length()) // (8 * width)  # equal leading bits, in tokens

    def _ids(self, raw: NDArray[Any]) -> Ids:
        """Returns tokens from byte-swapped integers, in which the largest value is a break."""
        ids = raw.byteswap().astype(np.int32)
        if self.width == 2:
            ids[ids == 2**16 - 1] = BREAK
        return ids


def sort_suffixes(ids: NDArray[np.uint64], count: int, depth: int) -> NDArray[np.int32]:
    """Returns the first ``count`` positions of ``ids``, sorted by the ``depth`` tokens (or more) from each on.

    Prefix doubling (Manber and Myers, 1993): sorts first by as many tokens as fit a 64-bit key, then by pairs of ranks
    twice as far apart each time, and only among positions that still tie.

    Args:
        ids: At least ``count`` + PAD values.
    """
    bits = int(ids.max(initial=1)).bit_length()
    compared = 64 // bits
    key = np.zeros(count, np.uint64)
    for ahead in range(compared):
        key = (key << np.uint64(bits)) | ids[ahead : ahead + count]
    order = np.argsort(key).astype(np.int32)
    rank = np.full(count + 1, count, np.int32)  # the end counts as breaks, which sort last
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
    """Gives positions with equal keys the first of their slots as rank."""
    starts = np.zeros(len(slots), np.int64)
    starts[1:] = np.where(keys[1:] != keys[:-1], np.arange(1, len(slots)), 0)
    rank[places] = slots[np.maximum.accumulate(starts)]


def _undecided(ranks: NDArray[np.int32], slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the slots that share their rank with a neighbour."""
    same = ranks[1:] == ranks[:-1]
    shared = np.zeros(len(slots), bool)
    shared[1:] |= same
    shared[:-1] |= same
    return slots[shared]


def _agreement(contexts: NDArray[Any], pattern: NDArray[Any]) -> NDArray[np.int64]:
    """Returns the number of leading tokens of each row [K, M] that equal ``pattern`` [M], as int [K]."""
    equal = np.zeros((len(contexts), len(pattern) + 1), bool)  # the last column ends every match
    np.equal(contexts, pattern, out=equal[:, :-1])
    return equal.argmin(1)
