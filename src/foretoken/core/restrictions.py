"""Restrictions of the output: forbidden words, and the interface of a grammar.

Forbidden words are indexed by the tokens before each word's last token. This module must not import torch, so that the
server's side process starts quickly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History

if TYPE_CHECKING:
    from torch import Tensor


_KEY = np.dtype(">i4")  # tokens as bytes


@dataclass(frozen=True, slots=True)
class BadWordsLookup:
    """The index that ``BadWords.banned`` uses."""

    alone: NDArray[np.int64]  # int64; words of one token
    # of the longer words, by the number of tokens before the last: these tokens as bytes, sorted, and the last tokens
    # in the same order
    prefixes: dict[int, tuple[NDArray[np.bytes_], NDArray[np.int32]]]
    # sorted pairs of the token before the last and the number of tokens before the last, in the high and low 32 bits
    lengths: NDArray[np.int64]


class BadWords(Sequence[tuple[int, ...]]):
    """Token sequences whose last token is forbidden where the text ends with the tokens before it.

    The tokens are kept in arrays, so that 100,000 words take a few MB and pass between processes at once. The time of
    ``banned`` grows with the length of the words, not with their number. The index is built on first use.
    """

    def __init__(self, words: Iterable[Sequence[int]] = ()) -> None:
        listed = [tuple(word) for word in words]
        if () in listed:
            raise InvalidRequest("bad_words holds a word without tokens; each needs at least one", param="bad_words")
        self._tokens = np.fromiter((token for word in listed for token in word), np.int32)
        self._ends = np.cumsum([0, *map(len, listed)], dtype=np.int32)

    @classmethod
    def of(cls, words: Iterable[Sequence[int]]) -> BadWords:
        """Returns ``words`` as BadWords. Raises InvalidRequest for a word without tokens."""
        return words if isinstance(words, cls) else cls(words)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[int, ...], ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        number = range(len(self))[index]
        return tuple(self._tokens[self._ends[number] : self._ends[number + 1]].tolist())

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BadWords):
            return np.array_equal(self._tokens, other._tokens) and np.array_equal(self._ends, other._ends)
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash((self._tokens.tobytes(), self._ends.tobytes()))

    def __repr__(self) -> str:
        return f"BadWords({list(self)})"

    @cached_property
    def single(self) -> NDArray[np.int64] | None:
        """The forbidden tokens, if every word is one token; None if some depend on the tokens before them."""
        return None if len(self.lookup.lengths) else self.lookup.alone

    def banned(self, tokens: Sequence[int], path: tuple[int, ...] = ()) -> NDArray[np.int64]:
        """Returns the tokens forbidden after ``tokens`` followed by ``path``."""
        lookup = self.lookup
        latest = path[-1] if path else tokens[-1] if tokens else None
        if latest is None:
            return lookup.alone
        lengths = lookup.lengths.data
        first, last = bisect_left(lengths, latest << 32), bisect_left(lengths, (latest + 1) << 32)
        if first == last:
            return lookup.alone
        banned: list[NDArray[Any]] = [lookup.alone]
        for length in (lookup.lengths[first:last] & 0xFFFFFFFF).tolist():
            committed = max(0, length - len(path))
            if committed <= len(tokens):
                tail = (*tokens[len(tokens) - committed :], *path[len(path) - length + committed :])
                keys, lasts = lookup.prefixes[length]
                key = np.array(tail, _KEY).view(keys.dtype)
                banned.append(lasts[np.searchsorted(keys, key, "left")[0] : np.searchsorted(keys, key, "right")[0]])
        return np.concatenate(banned, dtype=np.int64)

    @cached_property
    def lookup(self) -> BadWordsLookup:
        starts, before = self._ends[:-1], np.diff(self._ends) - 1
        lasts = self._tokens[self._ends[1:] - 1] if len(self) else self._tokens
        prefixes = {}
        for length in np.unique(before[before > 0]).tolist():
            chosen = before == length
            tokens = self._tokens[starts[chosen, None] + np.arange(length)]
            keys = np.ascontiguousarray(tokens, _KEY).view(f"S{_KEY.itemsize * length}")[:, 0]
            order = np.argsort(keys, kind="stable")
            prefixes[length] = keys[order], lasts[chosen][order]
        longer = before > 0
        lengths = np.unique(self._tokens[self._ends[1:][longer] - 2].astype(np.int64) << 32 | before[longer])
        return BadWordsLookup(np.unique(lasts[~longer]).astype(np.int64), prefixes, lengths)


class Grammar(Protocol):
    """A set of permitted outputs. One object serves one sequence, whose tokens are only appended to.

    The result depends on the history alone, so target, draft and plain decoding get the same one.
    """

    def allowed(self, history: History) -> Tensor | None:
        """Returns the tokens allowed at a node, bool [V] with at least one True. None allows every token.

        Only generated tokens and the draft path to the node count, not the prompt. Raises InvalidRequest if no token is
        allowed.
        """
        ...
