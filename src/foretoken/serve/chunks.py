"""Streams of OpenAI's chunks, for completions and chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from foretoken.outputs import StreamPiece
from foretoken.serve.errors import ApiError
from foretoken.serve.generation import Generation
from foretoken.serve.schema import Generate
from foretoken.serve.sse import DONE, event
from foretoken.serve.steps import step_record
from foretoken.serve.token_text import TokenText


class ChoiceWriter(Protocol):
    """Writes the choices of one endpoint's answer to one request.

    Attributes:
        object: What the endpoint calls its chunks.
    """

    object: str

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of reasoning so far."""
        ...

    def answer(self, generation: Generation, finals: Mapping[int, StreamPiece]) -> Mapping[str, Any]:
        """Returns the whole answer. finals: the last piece of every choice, by its number."""
        ...

    def opening(self) -> dict[str, Any]:
        """Returns what the first chunk has in addition."""
        ...

    def choices(self, number: int, piece: StreamPiece) -> list[dict[str, Any]]:
        """Returns what the piece adds, as choices of one chunk each; at least one for a choice's last piece."""
        ...

    def silent(self, number: int) -> dict[str, Any]:
        """Returns a choice that adds nothing."""
        ...


class ChunkWriter:
    """An ``AnswerWriter``: chunks of ``choices`` as events, the usage and the end mark."""

    def __init__(self, body: Generate, choices: ChoiceWriter, token_text: TokenText) -> None:
        self._body, self._choices, self._token_text = body, choices, token_text
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._begun = False

    def answer(self, generation: Generation, finals: Mapping[int, StreamPiece]) -> Mapping[str, Any]:
        """See ``AnswerWriter``."""
        return self._choices.answer(generation, finals)

    def opening(self, generation: Generation) -> bytes:
        """See ``AnswerWriter``."""
        return b""

    def piece(self, generation: Generation, piece: StreamPiece) -> bytes:
        """See ``AnswerWriter``."""
        number = generation.number(piece)
        choices = self._choices.choices(number, piece)
        if self._body.return_steps and not choices:
            choices = [self._choices.silent(number)]
        extra = {"usage": self._tokens(generation) if self._continuous else None} if self._usage else {}
        chunks = [self._head(generation) | {"choices": [choice]} | extra for choice in choices]
        if chunks and not self._begun:
            self._begun = True
            chunks[0] |= self._choices.opening()
        if self._body.return_steps:
            chunks[-1]["steps"] = [step_record(piece, number, self._token_text)]
        if generation.finished and not self._usage:
            chunks[-1]["metrics"] = generation.speculation(self._body.return_steps)
        return b"".join(map(event, chunks))

    def closing(self, generation: Generation) -> bytes:
        """See ``AnswerWriter``."""
        if not self._usage:
            return DONE
        metrics = generation.speculation(self._body.return_steps)
        last = {"choices": [], "usage": self._tokens(generation), "metrics": metrics}
        return event(self._head(generation) | last) + DONE

    def failure(self, generation: Generation, error: ApiError) -> bytes:
        """See ``AnswerWriter``. No end mark follows."""
        return event(error.body())

    def _head(self, generation: Generation) -> dict[str, Any]:
        return {
            "id": generation.id,
            "object": self._choices.object,
            "created": generation.created,
            "model": generation.model,
        }

    def _tokens(self, generation: Generation) -> Any:
        return generation.usage(self._choices.reasoning_tokens)
