"""Words that a request forbids, indexed by the tokens before each word's last one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class BadWordsLookup:
    """What ``BadWords.banned`` looks up.

    Args:
        alone: words of one token, int64.
        lasts: last tokens of longer words, by the tokens before them.
        lengths: the lengths of the keys of ``lasts``, by their last token.
    """

    alone: Tensor
    lasts: dict[tuple[int, ...], list[int]]
    lengths: dict[int | None, set[int]]


class BadWords(tuple[tuple[int, ...], ...]):
    """Token sequences whose last token cannot come where the tokens before it are the end of the text.

    ``banned`` takes time in the length of the words, however many there are. The index is built when it is first used.
    """

    @classmethod
    def of(cls, words: Iterable[Sequence[int]]) -> BadWords:
        """Returns ``words`` with an index. Raises InvalidRequest for a word without tokens."""
        if isinstance(words, cls):
            return words
        made = cls(tuple(word) for word in words)
        if () in made:
            raise InvalidRequest("bad_words holds a word without tokens; each needs at least one")
        return made

    def banned(self, tokens: Sequence[int], path: tuple[int, ...] = ()) -> Tensor:
        """The tokens that cannot come after ``tokens`` and then ``path``, int64."""
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
        """What ``banned`` looks up."""
        lasts: dict[tuple[int, ...], list[int]] = {}
        for word in dict.fromkeys(self):
            lasts.setdefault(word[:-1], []).append(word[-1])
        alone = torch.tensor(lasts.pop((), []), dtype=torch.int64)
        lengths: dict[int | None, set[int]] = {}
        for before in lasts:
            lengths.setdefault(before[-1], set()).add(len(before))
        return BadWordsLookup(alone, lasts, lengths)
