"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foretoken.outputs import StreamPiece
from foretoken.serve.chat_schema import ChatRequest, NamedTool
from foretoken.serve.generation import Generation, collect
from foretoken.serve.responses import ChatChoice, ChatCompletion, ChatLogprobs
from foretoken.serve.service import Service
from foretoken.serve.stream import cancel_on_disconnect, stream
from foretoken.serve.token_text import chat_logprobs
from foretoken.serve.tools import Delta, ToolParser, message_of


async def answer(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer it, as one object or as a stream."""
    prepared = await service.prepared(body, request)
    generation, body = await service.begin("chatcmpl", prepared), prepared.body
    writer = _ChatWriter(service, body, prepared.calls_only)
    if body.streams:
        return await stream(body, generation, writer, service.spelling, request.receive)
    with generation:
        finals = await cancel_on_disconnect(request.receive, collect(generation))
        return JSONResponse(_answer(writer, generation, finals, body.return_steps))


def _answer(
    writer: _ChatWriter, generation: Generation, finals: Mapping[int, StreamPiece], detailed: bool
) -> ChatCompletion:
    return {
        "id": generation.id,
        "object": "chat.completion",
        "created": generation.created,
        "model": generation.model,
        "choices": [writer.whole(number, final) for number, final in finals.items()],
        "usage": generation.usage(),
        "metrics": generation.metrics(detailed),
    }


class _ChatWriter:
    """Choices of a request; also its stream's ``Composer``. bare: the text is JSON of calls."""

    object = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, bare: bool) -> None:
        self._spelling, self._body, self._bare = service.spelling, body, bare
        self._voices = [self._voice() for _ in range(body.n or 1)]
        self._waiting: list[list[Any]] = [[] for _ in self._voices]

    def whole(self, number: int, final: StreamPiece) -> ChatChoice:
        """The finished choice at once."""
        output, voice = final.output, self._voices[number]
        assert output is not None
        deltas = [*voice.push(output.text), *voice.finish()]
        logprobs = self._logprobs(output.token_ids, output.logprobs)
        return {
            "index": number,
            "message": cast("Any", message_of(deltas)),
            "logprobs": {"content": logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": cast("Any", self._reason(voice, output.finish_reason)),
            "stop_reason": output.stop_reason,
        }

    def choices(self, number: int, piece: StreamPiece) -> list[dict[str, Any]]:
        """See ``Composer``: the role, what is said or called, and why it ended, in chunks of their own."""
        voice, waiting = self._voices[number], self._waiting[number]
        waiting += self._logprobs(piece.token_ids, piece.logprobs)
        deltas = voice.push(piece.text)
        if piece.output is not None:
            deltas += voice.finish()
        found = [self.silent(number) | {"delta": delta} for delta in deltas]
        if piece.output is not None:
            reason = self._reason(voice, piece.output.finish_reason)
            found.append(self.silent(number) | {"finish_reason": reason, "stop_reason": piece.output.stop_reason})
        if found and self._body.logprobs:  # log-probabilities come with the text of their tokens, or right behind
            logprobs: ChatLogprobs = {"content": list(waiting), "refusal": None}
            found[0]["logprobs"] = logprobs
            waiting.clear()
        if piece.step.position == 0:
            role = {"role": "assistant", "content": "", "refusal": None}
            found.insert(0, self.silent(number) | {"delta": role})
        return found

    def silent(self, number: int) -> dict[str, Any]:
        """See ``Composer``."""
        return {"index": number, "delta": {}, "logprobs": None, "finish_reason": None}

    def _voice(self) -> _Plain | ToolParser:
        tools = None if self._body.tool_choice == "none" else self._body.tools
        return ToolParser([tool.function.name for tool in tools], self._bare) if tools else _Plain()

    def _logprobs(self, tokens: Any, entries: Any) -> list[Any]:
        if not self._body.logprobs:
            return []
        return list(chat_logprobs(self._spelling, tokens, entries or (), self._body.top_logprobs or 0))

    def _reason(self, voice: _Plain | ToolParser, reason: str | None) -> str | None:
        """OpenAI's: calls are a reason of their own, unless the client named the function, or they were cut off."""
        named = isinstance(self._body.tool_choice, NamedTool)
        return "tool_calls" if reason == "stop" and voice.calls and not named else reason


class _Plain:
    """Where nothing can be called, text is text."""

    calls = 0

    def push(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def finish(self) -> list[Delta]:
        return []
