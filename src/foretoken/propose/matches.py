"""Finds earlier occurrences of the end of a text, and the tokens that followed them.

Repeated text is found by its left context, so the index sorts the positions of a text by the tokens that *precede*
them: a suffix array of the reversed text. A binary search finds the positions whose context agrees longest with the end
of the current text; the neighbours in the array are all occurrences of every shorter length, nearest first. Text that
still grows is not sorted: one vectorized comparison scans it (100,000 tokens in about 60 us).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.propose.base import Proposer

Ids = NDArray[np.int32]

BREAK = -1  # separates documents and pads both ends of a text; equals no token
PAD = 64  # breaks beyond each end, so that no window has to be clipped
LIMIT = 32  # maximum number of occurrences that are counted


@dataclass(frozen=True, slots=True)
class Matches:
    """Positions whose context agrees with the end of a text, longest agreement first, then the latest."""

    # int [K], number of tokens before the position that agree, from 1 to the length of the search pattern
    lengths: NDArray[np.int64]
    following: Ids  # int [K, steps], the tokens after each position; ``BREAK`` from the end of its document on

    @staticmethod
    def none() -> "Matches":
        return _NONE

    @staticmethod
    def best(parts: "Iterable[Matches]", limit: int) -> "Matches":
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

    periodic: The continuation of a position near the end wraps around into its own copy, as in text that repeats
    itself.
    address: Address of the first token, until the text is extended.
    """

    def __init__(self, periodic: bool = False) -> None:
        self.periodic = periodic
        self._hold(np.full(4 * PAD, BREAK, np.int32))  # PAD breaks, the text, at least PAD breaks
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def tokens(self) -> Ids:
        return self._buffer[PAD : PAD + self._count]

    def _hold(self, buffer: Ids) -> None:
        self._buffer, self.address = buffer, int(buffer.ctypes.data) + PAD * buffer.itemsize

    def tail(self, count: int) -> Ids:
        """Returns the last tokens, at most ``count``."""
        end = PAD + self._count
        return self._buffer[max(PAD, end - count) : end]

    def extend(self, tokens: Sequence[int] | Ids) -> None:
        start = PAD + self._count
        end = start + len(tokens)
        if end + PAD > len(self._buffer):
            grown = np.full(end + PAD + end // 2, BREAK, np.int32)
            grown[:start] = self._buffer[:start]
            self._hold(grown)
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
        lengths = agreement(text[places[:, None] - np.arange(1, len(tail) + 1)], tail[::-1])
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
        text, source = self._texts.get(context.id), context.source
        if text is None:
            text = self._texts[context.id] = GrowingText(periodic=True)
            text.extend([*context.tokens[:1], *source] if source else [])
        text.extend(context.tokens[len(text) - (len(source) + 1 if source else 0) :])
        return text

    def forget(self, context: Context) -> None:
        self._texts.pop(context.id, None)


class TextProposer(Proposer):
    """Base class of proposers of fixed candidates that continue occurrences of the end of a sequence's text."""

    costless = True

    def __init__(self) -> None:
        self._texts = ContextTexts()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(c, b) if b > 0 else Draft.empty() for c, b in zip(contexts, budgets, strict=True)]

    def forget(self, context: Context) -> None:
        self._texts.forget(context)

    def _draft(self, context: Context, budget: int) -> Draft:
        raise NotImplementedError


def agreement(contexts: NDArray[Any], pattern: NDArray[Any]) -> NDArray[np.int64]:
    """Returns the number of leading tokens of each row [K, M] that equal ``pattern`` [M], as int [K]."""
    equal = np.zeros((len(contexts), len(pattern) + 1), bool)  # the last column ends every match
    np.equal(contexts, pattern, out=equal[:, :-1])
    return equal.argmin(1)
