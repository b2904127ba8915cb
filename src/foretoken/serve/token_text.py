"""Tokens in answers: their bytes, log-probabilities in both of OpenAI's formats, and records of decode steps."""

import codecs
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.outputs import Logprob, StreamPiece
from foretoken.propose.pieces import Pieces
from foretoken.serve.answer_types import CompletionLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob

PHASES = ("propose", "score", "verify", "commit")  # of a decode step
LOWEST = -9999.0  # in place of minus infinity, which JSON cannot express

Entries = Mapping[int, Logprob]


class TokenText:
    """Returns the bytes and texts of token ids. The first use of ``pieces`` takes a while."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def pieces(self) -> Pieces | None:
        """The bytes of all tokens; None if they are unknown, so that decoded texts are used."""
        try:
            return Pieces(self._tokenizer)
        except InvalidRequest:
            return None

    def of(self, token: int) -> bytes:
        """Returns the bytes of a token, possibly only part of a character; of a special token those of its name."""
        return self.visible(token) or str(self._tokenizer.decode([token])).encode()

    def visible(self, token: int) -> bytes:
        """Returns the bytes that the token adds to a text. Special tokens add none."""
        if self.pieces is None:
            return str(self._tokenizer.decode([token], skip_special_tokens=True)).encode()
        return self.pieces.piece(token) or b""

    def text(self, token: int) -> str:
        """Returns the token as text, with U+FFFD for a part of a character."""
        return self.of(token).decode("utf-8", "replace")


def chat_logprobs(
    token_text: TokenText, tokens: Sequence[int], entries: Sequence[Entries], top: int
) -> list[TokenLogprob]:
    """Returns the log-probabilities of a chat: for each token, its own and those of the ``top`` most probable ones."""

    def entry(token: int, value: float) -> TopLogprob:
        return {"token": token_text.text(token), "logprob": max(value, LOWEST), "bytes": list(token_text.of(token))}

    return [
        {
            **entry(token, result[token].logprob),
            "top_logprobs": [entry(t, e.logprob) for t, e in result.items() if e.rank <= top][:top],
        }
        for token, result in zip(tokens, entries, strict=True)
    ]


def prompt_logprobs(prompt: Sequence[int], entries: Sequence[Entries | None], top: int) -> PromptLogprobs:
    """Returns the log-probabilities of a prompt's tokens and of the ``top`` most probable ones, in vLLM's format."""

    def shown(prompt_token: int, entry: Entries) -> dict[str, PromptLogprob]:
        return {
            str(token): {"logprob": max(e.logprob, LOWEST), "rank": e.rank, "decoded_token": e.decoded_token}
            for token, e in entry.items()
            if token == prompt_token or e.rank <= top
        }

    return [None if e is None else shown(token, e) for token, e in zip(prompt, entries, strict=True)]


class LegacyLogprobs:
    """Log-probabilities in the format of /v1/completions, for one choice as it grows.

    ``text_offset`` counts characters from the start of the text that the client gets.
    """

    def __init__(self, token_text: TokenText, top: int) -> None:
        self._token_text, self._top = token_text, top
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, tokens: Sequence[int], entries: Sequence[Entries | None]) -> CompletionLogprobs:
        """Returns the entries of the next tokens. An entry is None for the first token of a prompt."""
        result: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(tokens, entries, strict=True):
            result["tokens"].append(self._name(token))
            result["text_offset"].append(self._offset)
            result["token_logprobs"].append(None if entry is None else max(entry[token].logprob, LOWEST))
            if entry is None:
                result["top_logprobs"].append(None)
            else:
                kept = {t: e for t, e in entry.items() if e.rank <= self._top or t == token}
                result["top_logprobs"].append({self._name(t): max(e.logprob, LOWEST) for t, e in kept.items()})
            self._offset += len(self._characters.decode(self._token_text.visible(token)))
        return result

    def _name(self, token: int) -> str:
        """Returns OpenAI's name of a token: parts of characters are named by their bytes."""
        spelled = self._token_text.of(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def step_record(piece: StreamPiece, index: int, token_text: TokenText) -> dict[str, Any]:
    """Returns one decode step of one choice.

    ``draft`` has the draft tokens, parents before children. A parent is an index into it; -1 is the last committed
    token. p is the target's probability of the token, q the draft's, null for a fixed candidate. ``tokens`` has the
    emitted tokens, each an accepted draft token or the target's own.
    """
    step, explained = piece.step, piece.explained
    accepted = set(step.verdict.path[: step.accepted])
    nodes = range(len(step.draft))
    return {
        "index": index,
        "position": step.position,
        "batch": step.timings.batch,
        "draft": [
            {
                "token": step.draft.ids[node],
                "text": token_text.text(step.draft.ids[node]),
                "parent": step.draft.parents[node],
                "accepted": node in accepted,
                "p": explained.p[node] if explained else None,
                "q": explained.q[node] if explained else None,
            }
            for node in nodes
        ],
        "tokens": [
            {
                "token": token,
                "text": token_text.text(token),
                "origin": "accepted" if position < step.accepted else "target",
                "p": explained.emitted_prob[position] if explained else None,
            }
            for position, token in enumerate(step.tokens)
        ],
        "seconds": {phase: getattr(step.timings, phase) for phase in PHASES},
        "finish_reason": step.finish_reason,
    }
