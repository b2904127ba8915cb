"""POST /v1/chat/completions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from foretoken.core.errors import InvalidRequest
from foretoken.outputs import StreamPiece
from foretoken.serve.chat_schema import ChatRequest, Message, NamedTool
from foretoken.serve.errors import invalid
from foretoken.serve.generation import Generation, collect
from foretoken.serve.parameters import sampling
from foretoken.serve.responses import ChatChoice, ChatCompletion, ChatLogprobs
from foretoken.serve.service import Service
from foretoken.serve.stream import cancel_on_disconnect, stream
from foretoken.serve.token_text import chat_logprobs
from foretoken.serve.tools import Delta, ToolParser, forced, message_of, parsed_arguments


async def answer(service: Service, body: ChatRequest, receive: Receive) -> Response:
    """Answer it, as one object or as a stream."""
    service.named(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs is only allowed with logprobs: true", param="top_logprobs")
    service.check_counts(body.n or 1, 1, body.top_logprobs, "top_logprobs")
    calls = forced(body)
    llm, template = service.worker.llm, service.settings.chat_template
    text = await service.worker.run_in_thread(lambda: render(llm.tokenizer, body, template))
    ids = await service.tokenized(len(text), lambda: llm.requests.rendered(text), "messages")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling(
        body,
        {"json": calls} if calls is not None else None,
        n=body.n or 1,
        max_tokens=service.budget(asked, ids),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    generation = await service.begin("chatcmpl", body, [ids], params)
    writer = _ChatWriter(service, body, bare=calls is not None)
    if body.streams:
        return await stream(body, generation, writer, service.spelling, receive)
    with generation:
        finals = await cancel_on_disconnect(receive, collect(generation))
        return JSONResponse(_answer(writer, generation, finals, body.return_steps))


def render(tokenizer: Any, body: ChatRequest, template: str | None) -> str:
    """The conversation as a text, by ``template`` or the tokenizer's own. Raises InvalidRequest."""
    used = template or getattr(tokenizer, "chat_template", None)
    if not used:
        raise InvalidRequest(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template"
        )
    tools = None if body.tool_choice == "none" else body.tools
    if tools and body.tool_choice in (None, "auto") and isinstance(used, str) and "tools" not in used:
        raise InvalidRequest("tools cannot be told to this model: its chat template does not mention them")
    own = dict(body.chat_template_kwargs or {})
    reserved = sorted(own.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys())
    if reserved:
        raise InvalidRequest(f"chat_template_kwargs must not hold {', '.join(reserved)}; only the template's own names")
    if body.reasoning_effort is not None:
        own["reasoning_effort"] = body.reasoning_effort
    try:
        text: str = tokenizer.apply_chat_template(
            [_told(message) for message in body.messages],
            tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
            **own,
        )
    except InvalidRequest:
        raise
    except Exception as error:  # templates raise what they like, some on purpose
        raise InvalidRequest(f"messages do not fit the chat template: {error}") from error
    return text


def _told(message: Message) -> dict[str, Any]:
    """A message as templates want it: text in one piece, arguments as objects, OpenAI's ``developer`` as ``system``."""
    told = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        told["content"] = "\n".join(part.text for part in message.content)
    told.setdefault("content", "")
    told["role"] = "system" if message.role == "developer" else message.role
    for call in told.get("tool_calls", ()):
        call["function"]["arguments"] = parsed_arguments(call["function"]["arguments"])
    return told


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
