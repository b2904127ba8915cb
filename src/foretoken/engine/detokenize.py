"""Incremental detokenization: emits whole characters only, also where they span several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6  # prompt tokens that decide the spacing of the first new token


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class Detokenizer:
    """Decodes incrementally by the difference of two windows, which is correct for byte-level and sentencepiece.

    Args:
        tokenizer: Decodes token ids.
        prompt: Tokens of the prompt.
        skip_special_tokens: Whether special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._read = 0, len(self._ids)
        self._texts: dict[int, str] = {}  # of single tokens

    def push(self, token: int) -> str:
        """Returns the text that ``token`` completes; empty while a character is incomplete."""
        self._ids.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """Returns the remaining text after the last token: an incomplete character as U+FFFD."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._text_before()
        after = self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=self._skip)
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not final):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _text_before(self) -> str:
        """Returns the text of the tokens before the new ones: usually one token, and texts repeat their tokens."""
        before = self._ids[self._start : self._read]
        text = self._texts.get(before[0]) if len(before) == 1 else None
        if text is None:
            text = self._tokenizer.decode(before, skip_special_tokens=self._skip)
            if len(before) == 1:
                self._texts[before[0]] = text
        return text
