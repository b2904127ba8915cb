"""Answers of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from foretoken.outputs import StreamPiece
from foretoken.serve.chat_schema import ChatRequest, NamedTool
from foretoken.serve.generation import Generation
from foretoken.serve.intake import PreparedRequest
from foretoken.serve.responses import ChatChoice, ChatCompletion, ChatLogprobs
from foretoken.serve.token_text import TokenText, chat_logprobs
from foretoken.serve.tools import Delta, ToolParser, message_of


class ChatWriter:
    """See ``ResponseWriter``."""

    object = "chat.completion.chunk"

    def __init__(self, prepared: PreparedRequest[ChatRequest], token_text: TokenText) -> None:
        self._body, self._calls_only, self._token_text = prepared.body, prepared.calls_only, token_text
        self._parsers = [self._parser() for _ in range(prepared.params.n)]
        self._waiting: list[list[Any]] = [[] for _ in self._parsers]

    def answer(self, generation: Generation, finals: Mapping[int, StreamPiece]) -> ChatCompletion:
        """See ``ResponseWriter``."""
        return {
            "id": generation.id,
            "object": "chat.completion",
            "created": generation.created,
            "model": generation.model,
            "choices": [self._choice(number, final) for number, final in finals.items()],
            "usage": generation.usage(),
            "metrics": generation.speculation(self._body.return_steps),
        }

    def choices(self, number: int, piece: StreamPiece) -> list[dict[str, Any]]:
        """See ``ResponseWriter``. Role, content, calls and finish reason are sent in separate chunks."""
        parser, waiting = self._parsers[number], self._waiting[number]
        waiting += self._logprobs(piece.token_ids, piece.logprobs)
        deltas = parser.push(piece.text)
        if piece.output is not None:
            deltas += parser.finish()
        choices = [self.silent(number) | {"delta": delta} for delta in deltas]
        if piece.output is not None:
            reason = self._reason(parser, piece.output.finish_reason)
            choices.append(self.silent(number) | {"finish_reason": reason, "stop_reason": piece.output.stop_reason})
        if (
            choices and self._body.logprobs
        ):  # log-probabilities are in the chunk of their tokens' text, or in a later one
            logprobs: ChatLogprobs = {"content": list(waiting), "refusal": None}
            choices[0]["logprobs"] = logprobs
            waiting.clear()
        if piece.step.position == 0:
            role = {"role": "assistant", "content": "", "refusal": None}
            choices.insert(0, self.silent(number) | {"delta": role})
        return choices

    def silent(self, number: int) -> dict[str, Any]:
        """See ``ResponseWriter``."""
        return {"index": number, "delta": {}, "logprobs": None, "finish_reason": None}

    def _choice(self, number: int, final: StreamPiece) -> ChatChoice:
        output, parser = final.output, self._parsers[number]
        assert output is not None
        deltas = [*parser.push(output.text), *parser.finish()]
        logprobs = self._logprobs(output.token_ids, output.logprobs)
        return {
            "index": number,
            "message": cast("Any", message_of(deltas)),
            "logprobs": {"content": logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": cast("Any", self._reason(parser, output.finish_reason)),
            "stop_reason": output.stop_reason,
        }

    def _parser(self) -> _TextParser | ToolParser:
        tools = None if self._body.tool_choice == "none" else self._body.tools
        return ToolParser([tool.function.name for tool in tools], self._calls_only) if tools else _TextParser()

    def _logprobs(self, tokens: Any, entries: Any) -> list[Any]:
        if not self._body.logprobs:
            return []
        return list(chat_logprobs(self._token_text, tokens, entries or (), self._body.top_logprobs or 0))

    def _reason(self, parser: _TextParser | ToolParser, reason: str | None) -> str | None:
        """Returns OpenAI's finish reason.

        It is "tool_calls" after complete calls that the model chose; for a function that the client named it is "stop".
        """
        named = isinstance(self._body.tool_choice, NamedTool)
        return "tool_calls" if reason == "stop" and parser.calls and not named else reason


class _TextParser:
    """A ``ToolParser`` for requests without tools: the text is the content."""

    calls = 0

    def push(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def finish(self) -> list[Delta]:
        return []
