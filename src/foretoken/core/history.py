"""The tokens before one node of a draft tree, and how often each token occurs among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The unique tokens of one sequence and how often each was generated, extended as the sequence grows.

    Args:
        prompt_length: Number of prompt tokens, which do not count as generated.
    """

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length, self._num_tokens = prompt_length, 0
        self._index: dict[int, int] = {}
        self._ids, self._counts = np.empty(0, np.int64), np.empty(0, np.int32)

    def at(self, tokens: Sequence[int], path: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Returns the unique ids of ``tokens`` and ``path``, and the number of times that each was generated.

        Args:
            tokens: The sequence's tokens. They begin with those of earlier calls.
            path: Draft tokens after them.
        """
        for position, token in enumerate(tokens[self._num_tokens :], self._num_tokens):
            self._add(token, position >= self._prompt_length)
        self._num_tokens = len(tokens)
        size = len(self._index)
        if not path:
            return self._ids[:size], self._counts[:size]
        new = [token for token in dict.fromkeys(path) if token not in self._index]
        ids = np.concatenate((self._ids[:size], np.array(new, np.int64)))
        counts = np.concatenate((self._counts[:size], np.zeros(len(new), np.int32)))
        for token in path:
            index = self._index.get(token)
            counts[size + new.index(token) if index is None else index] += 1
        return ids, counts

    def _add(self, token: int, generated: bool) -> None:
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(index + 64, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(index + 64, np.int32)))
        self._ids[index] = token
        self._counts[index] += generated


@dataclass(frozen=True, slots=True)
class History:
    """All tokens before one tree node.

    Args:
        tokens: Committed tokens, prompt and output. The sequence object grows as the request does.
        prompt_length: Number of prompt tokens at the beginning of ``tokens``.
        path: Draft tokens from the root to the node.
        counts: Counts of the sequence, which all of its histories share; None to count from the beginning.
    """

    tokens: Sequence[int]
    prompt_length: int
    path: tuple[int, ...] = ()
    counts: TokenCounts | None = field(default=None, compare=False, repr=False)

    @property
    def generated(self) -> int:
        """Returns the number of generated tokens, draft tokens of ``path`` included."""
        return len(self.tokens) - self.prompt_length + len(self.path)

    def token_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Returns the unique ids of all tokens, and the number of times that each was generated, ``path`` included."""
        return (self.counts or TokenCounts(self.prompt_length)).at(self.tokens, self.path)
