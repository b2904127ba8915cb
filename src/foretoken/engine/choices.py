"""Structured outputs that are one of a list of texts, by binary search in the sorted texts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History

_CACHED = 64  # cached masks of each list of texts


class TokenList:
    """A tokenizer's tokens in the order of their bytes.

    Args:
        spelled: Bytes of each id. Tokens without bytes, such as special tokens, are never part of a text.
        vocab_size: Number of logits of the model. Larger ids are omitted.
    """

    def __init__(self, spelled: Sequence[bytes | None], vocab_size: int) -> None:
        self.spelled, self.vocab_size = spelled[:vocab_size], vocab_size
        pairs = sorted((piece, token) for token, piece in enumerate(self.spelled) if piece)
        self.texts, self.ids = [piece for piece, _ in pairs], [token for _, token in pairs]

    def text(self, tokens: Sequence[int]) -> bytes | None:
        """Returns the bytes of ``tokens``; None if one of them has none."""
        pieces = [self.spelled[token] if token < len(self.spelled) else None for token in tokens]
        return b"".join(piece or b"" for piece in pieces) if all(pieces) else None


class Choices:
    """A ``Restriction`` to one of several texts. Raises InvalidRequest if no token begins one of them."""

    alive = True

    def __init__(self, texts: Collection[str], tokens: TokenList) -> None:
        self.tokens = tokens
        self._texts = sorted({text.encode() for text in texts})
        self._masks: OrderedDict[bytes, tuple[Tensor, bool] | None] = OrderedDict()
        beginning = self.after(b"")
        if beginning is None or not (beginning[1] or beginning[0].any()):
            raise InvalidRequest(
                "structured_outputs cannot be followed: no token of the model can come", param="structured_outputs"
            )

    @property
    def memory_bytes(self) -> int:
        """Estimated memory."""
        return sum(map(len, self._texts)) + 64 * len(self._texts) + _CACHED * self.tokens.vocab_size

    def follow(self, ends: Collection[int]) -> ChoiceGrammar:
        """Returns a grammar for one sequence. ends: ids that end a text."""
        return ChoiceGrammar(self, ends)

    def after(self, text: bytes) -> tuple[Tensor, bool] | None:
        """Returns the tokens allowed after ``text``, bool [V], and whether ``text`` is complete.

        Returns None if none of the texts begins with ``text``.
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
        """Returns the tokens that continue the texts from ``start`` to ``end`` after their first ``depth`` bytes.

        Both lists are sorted, so the texts and the tokens that continue with the same bytes are one range of each.
        """
        texts, tokens, ids = self._texts, self.tokens.texts, list[int]()
        ranges = [(start, end, 0, len(tokens), 0)]  # ranges of texts and tokens, and the number of bytes they share
        while ranges:
            start, end, first, last, shared = ranges.pop()
            while first < last and len(tokens[first]) == shared:
                ids.append(self.tokens.ids[first])
                first += 1
            start += len(texts[start]) == depth + shared
            in_text, in_token = itemgetter(depth + shared), itemgetter(shared)
            while start < end and first < last:
                byte = texts[start][depth + shared]
                stop = bisect_right(texts, byte, start, end, key=in_text)
                first = bisect_left(tokens, byte, first, last, key=in_token)
                after = bisect_right(tokens, byte, first, last, key=in_token)
                if first < after:
                    ranges.append((start, stop, first, after, shared + 1))
                start, first = stop, after
        return ids


class ChoiceGrammar:
    """A ``Grammar`` that allows one of the texts of ``choices``, then one of ``ends``."""

    def __init__(self, choices: Choices, ends: Collection[int]) -> None:
        self._choices, self._ends = choices, sorted(ends)

    def allowed(self, history: History) -> Tensor | None:
        """See ``Grammar``. Returns None after an end id, and after tokens that begin none of the texts."""
        text = self._choices.tokens.text((*history.tokens[history.prompt_length :], *history.path))
        after = None if text is None else self._choices.after(text)
        if after is None:
            return None
        mask = after[0].clone()
        mask[self._ends] = after[1]
        if not mask.any():
            raise InvalidRequest(
                "structured_outputs cannot be followed any further: no token of the model can come",
                param="structured_outputs",
            )
        return mask
