"""A text with its positions sorted by context, for fast searches: a suffix array of the reversed text."""

import mmap
from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.propose.matches import BREAK, LIMIT, PAD, Ids, Matches, agreement


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
    def build(cls, tokens: Ids, depth: int) -> "SuffixArray":
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
            return Matches.none()
        places = self._order[max(0, at - limit) : at + limit].astype(np.int64)
        contexts = self._raw[places[:, None] + np.arange(len(pattern))]
        lengths = agreement(contexts, pattern.view(f"=u{self.width}"))
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
