"""Tokens to text as they come: whole characters only, whatever tokens they straddle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6  # prompt tokens that decide how the first new token is spaced


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class Detokenizer:
    """Incremental decoding by the difference of two windows, which is right for byte-level and sentencepiece alike."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._read = 0, len(self._ids)

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        self._ids.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """What is left when no more tokens come: an unfinished character as U+FFFD."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not final):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
