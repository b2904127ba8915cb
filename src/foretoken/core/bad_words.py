"""Forbidden words of a request, indexed by the tokens before each word's last token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class BadWordsLookup:
    """The index that ``BadWords.banned`` uses.

    Args:
        alone: int64. Words of one token.
        lasts: Last tokens of longer words, by the tokens before them.
        lengths: Lengths of the keys of ``lasts``, by the key's last token.
    """

    alone: Tensor
    lasts: dict[tuple[int, ...], list[int]]
    lengths: dict[int | None, set[int]]


class BadWords(tuple[tuple[int, ...], ...]):
    """Token sequences whose last token is forbidden where the text ends with the tokens before it.

    The time of ``banned`` grows with the length of the words, not with their number. The index is built on first use.
    """

    @classmethod
    def of(cls, words: Iterable[Sequence[int]]) -> BadWords:
        """Returns ``words`` as BadWords. Raises InvalidRequest for a word without tokens."""
        if isinstance(words, cls):
            return words
        bad_words = cls(tuple(word) for word in words)
        if () in bad_words:
            raise InvalidRequest("bad_words holds a word without tokens; each needs at least one")
        return bad_words

    def banned(self, tokens: Sequence[int], path: tuple[int, ...] = ()) -> Tensor:
        """Returns the tokens forbidden after ``tokens`` followed by ``path``, int64."""
        lookup = self.lookup
        latest = path[-1] if path else tokens[-1] if tokens else None
        banned: list[int] = []
        for length in lookup.lengths.get(latest, ()):
            committed = max(0, length - len(path))
            if committed <= len(tokens):
                tail = (*tokens[len(tokens) - committed :], *path[len(path) - length + committed :])
                banned += lookup.lasts.get(tail, ())
        return torch.cat([lookup.alone, torch.tensor(banned)]) if banned else lookup.alone

    @cached_property
    def lookup(self) -> BadWordsLookup:
        """The index, built on first use."""
        lasts: dict[tuple[int, ...], list[int]] = {}
        for word in dict.fromkeys(self):
            lasts.setdefault(word[:-1], []).append(word[-1])
        alone = torch.tensor(lasts.pop((), []), dtype=torch.int64)
        lengths: dict[int | None, set[int]] = {}
        for before in lasts:
            lengths.setdefault(before[-1], set()).add(len(before))
        return BadWordsLookup(alone, lasts, lengths)
