"""Tokens as clients see them: their bytes, and log-probabilities in both of OpenAI's forms."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.outputs import Logprob
from foretoken.propose.pieces import Pieces
from foretoken.serve.responses import CompletionLogprobs, TokenLogprob, TopLogprob

LOWEST = -9999.0  # what stands for minus infinity, which JSON does not have

Entries = Mapping[int, Logprob]


class TokenText:
    """What the ids of a tokenizer spell. ``load`` takes a while and has to come first."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: Pieces | None = None
        self._loaded = False

    def load(self) -> None:
        """Read the tokenizer; twice does nothing."""
        if self._loaded:
            return
        try:
            self._pieces = Pieces(self._tokenizer)
        except InvalidRequest:
            self._pieces = None  # a tokenizer that does not tell its bytes: what it decodes to has to do
        self._loaded = True

    def of(self, token: int) -> bytes:
        """Also of a part of a character, and of a special token its name."""
        return self.visible(token) or str(self._tokenizer.decode([token])).encode()

    def visible(self, token: int) -> bytes:
        """What the token adds to a text; special tokens add nothing."""
        if self._pieces is None:
            return str(self._tokenizer.decode([token], skip_special_tokens=True)).encode()
        return self._pieces.piece(token) or b""

    def text(self, token: int) -> str:
        """With U+FFFD for a part of a character."""
        return self.of(token).decode("utf-8", "replace")


def chat_logprobs(
    spelling: TokenText, tokens: Sequence[int], entries: Sequence[Entries], top: int
) -> list[TokenLogprob]:
    """``top`` of the likeliest beside each token."""

    def entry(token: int, value: float) -> TopLogprob:
        return {"token": spelling.text(token), "logprob": max(value, LOWEST), "bytes": list(spelling.of(token))}

    return [
        {
            **entry(token, found[token].logprob),
            "top_logprobs": [entry(t, e.logprob) for t, e in found.items() if e.rank <= top][:top],
        }
        for token, found in zip(tokens, entries, strict=True)
    ]


class LegacyLogprobs:
    """The form of /v1/completions, for one choice as it grows. ``top``: alternatives to show beside the token itself.

    ``text_offset`` counts characters from the start of the text that the client gets.
    """

    def __init__(self, spelling: TokenText, top: int) -> None:
        self._spelling, self._top = spelling, top
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, tokens: Sequence[int], entries: Sequence[Entries | None]) -> CompletionLogprobs:
        """What comes next. An entry is None where nothing came before the token."""
        found: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(tokens, entries, strict=True):
            found["tokens"].append(self._name(token))
            found["text_offset"].append(self._offset)
            found["token_logprobs"].append(None if entry is None else max(entry[token].logprob, LOWEST))
            found["top_logprobs"].append(None if entry is None else self._likeliest(token, entry))
            self._offset += len(self._characters.decode(self._spelling.visible(token)))
        return found

    def _likeliest(self, token: int, entries: Entries) -> dict[str, float]:
        kept = {t: e for t, e in entries.items() if e.rank <= self._top or t == token}
        return {self._name(t): max(e.logprob, LOWEST) for t, e in kept.items()}

    def _name(self, token: int) -> str:
        """As OpenAI names tokens: parts of characters by their bytes."""
        spelled = self._spelling.of(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
