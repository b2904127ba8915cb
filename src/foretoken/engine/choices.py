"""Structured outputs that are one of a list of texts: which tokens can come, found in the sorted texts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import History

_CACHED = 64  # masks that are kept for each list of texts


class TokenList:
    """A tokenizer's tokens in the order of their bytes.

    Args:
        spelled: bytes by id. Tokens without any, such as special tokens, are never part of a text.
        vocab_size: the model's number of logits; ids from there on are left out.
    """

    def __init__(self, spelled: Sequence[bytes | None], vocab_size: int) -> None:
        self.spelled, self.vocab_size = spelled[:vocab_size], vocab_size
        pairs = sorted((piece, token) for token, piece in enumerate(self.spelled) if piece)
        self.texts, self.ids = [piece for piece, _ in pairs], [token for _, token in pairs]

    def text(self, tokens: Sequence[int]) -> bytes | None:
        """The bytes of ``tokens``; None if one of them has none."""
        pieces = [self.spelled[token] if token < len(self.spelled) else None for token in tokens]
        return b"".join(piece or b"" for piece in pieces) if all(pieces) else None


class Choices:
    """A ``Restriction``: texts of which exactly one is to come. Raises InvalidRequest if no token begins one."""

    alive = True

    def __init__(self, texts: Collection[str], tokens: TokenList) -> None:
        self.tokens = tokens
        self._texts = sorted({text.encode() for text in texts})
        self._masks: OrderedDict[bytes, tuple[Tensor, bool] | None] = OrderedDict()
        beginning = self.after(b"")
        if beginning is None or not (beginning[1] or beginning[0].any()):
            raise InvalidRequest("structured_outputs cannot be followed: no token of the model can come")

    @property
    def memory_bytes(self) -> int:
        """An estimate."""
        return sum(map(len, self._texts)) + 64 * len(self._texts) + _CACHED * self.tokens.vocab_size

    def follow(self, ends: Collection[int]) -> ChoiceGrammar:
        """Returns a grammar for one sequence. ends: ids that end a text."""
        return ChoiceGrammar(self, ends)

    def after(self, text: bytes) -> tuple[Tensor, bool] | None:
        """Returns the tokens that can come after ``text``, bool [V], and whether ``text`` is complete.

        None where none of the texts begins with ``text``.
        """
        if text not in self._masks:
            self._masks[text] = self._search(text)
            if len(self._masks) > _CACHED:
                self._masks.popitem(last=False)
        return self._masks[text]

    def _search(self, text: bytes) -> tuple[Tensor, bool] | None:
        depth = len(text)
        start = bisect_left(self._texts, text)
        end = bisect_right(self._texts, text, start, key=lambda choice: choice[:depth])
        if start == end:
            return None
        mask = torch.zeros(self.tokens.vocab_size, dtype=torch.bool)
        mask[self._beginnings(start, end, depth)] = True
        return mask, len(self._texts[start]) == depth

    def _beginnings(self, start: int, end: int, depth: int) -> list[int]:
        """Returns the tokens with which the texts from ``start`` to ``end`` go on after their first ``depth`` bytes.

        Both lists are sorted, so the texts and the tokens that go on with the same bytes are one range of each.
        """
        texts, tokens, found = self._texts, self.tokens.texts, []
        ranges = [(start, end, 0, len(tokens), 0)]  # of texts and of tokens, and the bytes they share
        while ranges:
            start, end, first, last, shared = ranges.pop()
            while first < last and len(tokens[first]) == shared:
                found.append(self.tokens.ids[first])
                first += 1
            start += len(texts[start]) == depth + shared
            in_text, in_token = itemgetter(depth + shared), itemgetter(shared)
            while start < end and first < last:
                byte = texts[start][depth + shared]
                stop = bisect_right(texts, byte, start, end, key=in_text)
                first = bisect_left(tokens, byte, first, last, key=in_token)
                behind = bisect_right(tokens, byte, first, last, key=in_token)
                if first < behind:
                    ranges.append((start, stop, first, behind, shared + 1))
                start, first = stop, behind
        return found


class ChoiceGrammar:
    """A ``Grammar``: one of the texts of ``choices``, then one of ``ends``."""

    def __init__(self, choices: Choices, ends: Collection[int]) -> None:
        self._choices, self._ends = choices, sorted(ends)

    def allowed(self, history: History) -> Tensor | None:
        """See ``Grammar``. None behind an end, and behind tokens that none of the texts begins with."""
        text = self._choices.tokens.text((*history.tokens[history.prompt_length :], *history.path))
        after = None if text is None else self._choices.after(text)
        if after is None:
            return None
        mask = after[0].clone()
        mask[self._ends] = after[1]
        if not mask.any():
            raise InvalidRequest("structured_outputs cannot be followed any further: no token of the model can come")
        return mask
