"""The tokens before one node of a draft tree, and how often each token occurs among them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The unique tokens of one sequence and how often each was generated, extended as the sequence grows.

    prompt_length: Number of prompt tokens, which do not count as generated.
    """

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length, self._num_tokens = prompt_length, 0
        self._index: dict[int, int] = {}
        self._ids, self._counts = array("q"), array("i")

    def at(self, tokens: Sequence[int], path: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Returns the unique ids of ``tokens`` and ``path``, and the number of times that each was generated.

        Args:
            tokens: The sequence's tokens. They begin with those of earlier calls.
            path: Draft tokens after them.
        """
        self._extend(tokens)
        size = len(self._index)
        new = [token for token in dict.fromkeys(path) if token not in self._index]
        ids = np.concatenate((np.array(self._ids, np.int64), np.array(new, np.int64)))
        counts = np.concatenate((np.array(self._counts, np.int32), np.zeros(len(new), np.int32)))
        for token in path:
            index = self._index.get(token)
            counts[size + new.index(token) if index is None else index] += 1
        return ids, counts

    def addresses(self, tokens: Sequence[int]) -> tuple[int, int, int]:
        """Returns the addresses of ``at`` without a path, which hold until the next call, and the number of ids."""
        self._extend(tokens)
        ids, size = self._ids.buffer_info()
        return ids, self._counts.buffer_info()[0], size

    def _extend(self, tokens: Sequence[int]) -> None:
        ids, counts, index, prompt_length = self._ids, self._counts, self._index, self._prompt_length
        for position, token in enumerate(tokens[self._num_tokens :], self._num_tokens):
            at = index.setdefault(token, len(ids))
            if at == len(ids):
                ids.append(token)
                counts.append(0)
            counts[at] += position >= prompt_length
        self._num_tokens = len(tokens)


@dataclass(frozen=True, slots=True)
class History:
    """All tokens before one tree node."""

    tokens: Sequence[int]  # committed tokens, prompt and output; the sequence object grows as the request does
    prompt_length: int  # number of prompt tokens at the beginning of ``tokens``
    path: tuple[int, ...] = ()  # draft tokens from the root to the node
    # counts of the sequence, which all of its histories share; None to count from the beginning
    counts: TokenCounts | None = field(default=None, compare=False, repr=False)

    @property
    def generated(self) -> int:
        """Returns the number of generated tokens, draft tokens of ``path`` included."""
        return len(self.tokens) - self.prompt_length + len(self.path)

    def token_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Returns the unique ids of all tokens, and the number of times that each was generated, ``path`` included."""
        return (self.counts or TokenCounts(self.prompt_length)).at(self.tokens, self.path)
