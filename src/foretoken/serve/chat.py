"""Answers of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from foretoken.outputs import CompletionOutput, StreamPiece
from foretoken.serve.answers import ChatChoice, ChatCompletion, ChatLogprobs
from foretoken.serve.chat_schema import ChatRequest, NamedTool
from foretoken.serve.generation import Generation
from foretoken.serve.intake import PreparedRequest
from foretoken.serve.output import (
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from foretoken.serve.token_text import TokenText, chat_logprobs, prompt_logprobs

Delta = dict[str, Any]


class ChatWriter:
    """See ``ChoiceWriter``."""

    object = "chat.completion.chunk"

    def __init__(self, prepared: PreparedRequest[ChatRequest], token_text: TokenText) -> None:
        self._body, self._prompt, self._token_text = prepared.body, prepared.prompts[0], token_text
        self._parsers = [prepared.output.parser() for _ in range(prepared.params.n)]
        self._waiting: list[_Waiting] = [_Waiting() for _ in self._parsers]

    def answer(self, generation: Generation, finals: Mapping[int, StreamPiece]) -> ChatCompletion:
        """See ``ChoiceWriter``."""
        choices = [self._choice(number, final) for number, final in finals.items()]
        answer: ChatCompletion = {
            "id": generation.id,
            "object": "chat.completion",
            "created": generation.created,
            "model": generation.model,
            "choices": choices,
            "usage": generation.usage(self.reasoning_tokens),
            "metrics": generation.speculation(self._body.return_steps),
        }
        if self._body.prompt_logprobs is not None:
            entries = finals[0].prompt_logprobs or ()
            answer["prompt_logprobs"] = prompt_logprobs(self._prompt.ids, entries, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt.ids
        return answer

    @property
    def reasoning_tokens(self) -> int:
        """See ``ChoiceWriter``."""
        return sum(parser.reasoning_tokens for parser in self._parsers)

    def choices(self, number: int, piece: StreamPiece) -> list[dict[str, Any]]:
        """See ``ChoiceWriter``. Role, content, calls and finish reason are sent in separate chunks."""
        parser, waiting = self._parsers[number], self._waiting[number]
        waiting.logprobs += self._logprobs(piece.token_ids, piece.logprobs)
        waiting.tokens += piece.token_ids
        events = parser.push(piece.text, piece.token_ids)
        if piece.output is not None:
            events += parser.finish()
        choices = [self.silent(number) | {"delta": delta} for delta in deltas_of(events)]
        if piece.output is not None:
            reason = self._reason(parser, piece.output)
            choices.append(self.silent(number) | {"finish_reason": reason, "stop_reason": piece.output.stop_reason})
        if choices:  # log-probabilities and ids are in the chunk of their tokens' text, or in a later one
            choices[0] |= waiting.taken(bool(self._body.logprobs), bool(self._body.return_token_ids))
        if piece.step.position == 0:
            role = {"role": "assistant", "content": "", "refusal": None}
            choices.insert(0, self.silent(number) | {"delta": role})
        return choices

    def opening(self) -> dict[str, Any]:
        """See ``ChoiceWriter``."""
        return {"prompt_token_ids": self._prompt.ids} if self._body.return_token_ids else {}

    def silent(self, number: int) -> dict[str, Any]:
        """See ``ChoiceWriter``."""
        return {"index": number, "delta": {}, "logprobs": None, "finish_reason": None}

    def _choice(self, number: int, final: StreamPiece) -> ChatChoice:
        output, parser = final.output, self._parsers[number]
        assert output is not None
        events = [*parser.push(output.text, output.token_ids), *parser.finish()]
        logprobs = self._logprobs(output.token_ids, output.logprobs)
        choice: ChatChoice = {
            "index": number,
            "message": cast("Any", message_of(events)),
            "logprobs": {"content": logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": cast("Any", self._reason(parser, output)),
            "stop_reason": output.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        return choice

    def _logprobs(self, tokens: Any, entries: Any) -> list[Any]:
        if not self._body.logprobs:
            return []
        return list(chat_logprobs(self._token_text, tokens, entries or (), self._body.top_logprobs or 0))

    def _reason(self, parser: OutputParser, output: CompletionOutput) -> str | None:
        """Returns OpenAI's finish reason.

        It is "tool_calls" after complete calls that the model chose; for a function that the client named, or after a
        call that a stop string cut, it is "stop".
        """
        named = isinstance(self._body.tool_choice, NamedTool)
        cut = parser.cut and isinstance(output.stop_reason, str)
        called = output.finish_reason == "stop" and parser.calls and not cut and not named
        return "tool_calls" if called else output.finish_reason


class _Waiting:
    """Log-probabilities and ids of tokens whose text is still held back."""

    def __init__(self) -> None:
        self.logprobs: list[Any] = []
        self.tokens: list[int] = []

    def taken(self, logprobs: bool, tokens: bool) -> dict[str, Any]:
        """Returns what a chunk is to carry, and forgets it."""
        content: ChatLogprobs = {"content": self.logprobs, "refusal": None}
        carried = ({"logprobs": content} if logprobs else {}) | ({"token_ids": self.tokens} if tokens else {})
        self.logprobs, self.tokens = [], []
        return carried


def deltas_of(events: Iterable[OutputEvent]) -> list[Delta]:
    """Returns OpenAI's deltas of a chat."""
    deltas: list[Delta] = []
    for event in events:
        match event:
            case TextDelta(text):
                deltas.append({"content": text})
            case ReasoningDelta(text):
                deltas.append({"reasoning_content": text})
            case ToolCallStarted(index, identifier, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": f"call_{identifier}", "type": "function", "function": function}
                deltas.append({"tool_calls": [call]})
            case ToolCallDelta(index, arguments):
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
    return deltas


def message_of(events: Iterable[OutputEvent]) -> dict[str, Any]:
    """Returns OpenAI's message that is the sum of an answer's events."""
    text: str | None = None
    reasoning = ""
    calls: list[dict[str, Any]] = []
    for event in events:
        match event:
            case TextDelta(part):
                text = (text or "") + part
            case ReasoningDelta(part):
                reasoning += part
            case ToolCallStarted(_, identifier, name):
                function = {"name": name, "arguments": ""}
                calls.append({"id": f"call_{identifier}", "type": "function", "function": function})
            case ToolCallDelta(index, arguments):
                calls[index]["function"]["arguments"] += arguments
    content = "" if text is None and not calls else text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    return message | ({"tool_calls": calls} if calls else {})
