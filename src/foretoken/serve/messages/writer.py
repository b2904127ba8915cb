"""Answers of POST /v1/messages: the message, and its events in Anthropic's order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from foretoken.outputs import StreamPiece
from foretoken.serve.answers import AnthropicMessage, AnthropicUsage
from foretoken.serve.errors import ApiError
from foretoken.serve.generation import Generation
from foretoken.serve.intake import PreparedRequest
from foretoken.serve.messages.schema import MessagesRequest
from foretoken.serve.output import Block, BlockChange, Blocks
from foretoken.serve.parsers.values import object_of
from foretoken.serve.sse import event


class MessageWriter:
    """An ``AnswerWriter``.

    Args:
        prepared: The request.
        request_id: Identifier of the request, for errors in the stream.
    """

    def __init__(self, prepared: PreparedRequest[MessagesRequest], request_id: str | None) -> None:
        self._body, self._cut, self._request_id = prepared.body, prepared.cut, request_id
        self._parser = prepared.output.parser()
        self._blocks = Blocks()
        self._final: StreamPiece | None = None

    def answer(self, generation: Generation, finals: Mapping[int, StreamPiece]) -> Mapping[str, Any]:
        """See ``AnswerWriter``."""
        (self._final,) = finals.values()
        output = self._final.output
        assert output is not None
        self._blocks.add([*self._parser.push(output.text, output.token_ids), *self._parser.finish()])
        message = self._message(generation, [_whole(block) for block in self._blocks.all])
        return message | self._stop() | {"metrics": generation.speculation(self._body.return_steps)}

    def opening(self, generation: Generation) -> bytes:
        """See ``AnswerWriter``."""
        message = self._message(generation, [])
        message["usage"]["output_tokens"] = 0
        return _event("message_start", message=message) + _event("ping")

    def piece(self, generation: Generation, piece: StreamPiece) -> bytes:
        """See ``AnswerWriter``."""
        events = self._parser.push(piece.text, piece.token_ids)
        if piece.output is not None:
            self._final = piece
            events += self._parser.finish()
        changes = self._blocks.add(events)
        if piece.output is not None:
            changes += self._blocks.end()
        return b"".join(map(_events_of, changes))

    def closing(self, generation: Generation) -> bytes:
        """See ``AnswerWriter``."""
        metrics = generation.speculation(self._body.return_steps)
        last = _event("message_delta", delta=self._stop(), usage=_usage(generation), metrics=metrics)
        return last + _event("message_stop")

    def failure(self, generation: Generation, error: ApiError) -> bytes:
        """See ``AnswerWriter``."""
        return event(error.anthropic_body(self._request_id), "error")

    def _message(self, generation: Generation, content: list[dict[str, Any]]) -> AnthropicMessage:
        return {
            "id": generation.id,
            "type": "message",
            "role": "assistant",
            "model": generation.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(generation),
        }

    def _stop(self) -> dict[str, Any]:
        """Returns why the text ended, by Anthropic's names."""
        output = self._final.output if self._final is not None else None
        reason, by = (output.finish_reason, output.stop_reason) if output is not None else (None, None)
        if reason == "length":
            return {
                "stop_reason": "model_context_window_exceeded" if self._cut else "max_tokens",
                "stop_sequence": None,
            }
        if isinstance(by, str) and (self._parser.cut or not self._parser.calls):
            return {"stop_reason": "stop_sequence", "stop_sequence": by}
        if self._parser.calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(generation: Generation) -> AnthropicUsage:
    usage = generation.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _events_of(change: BlockChange) -> bytes:
    block = change.block
    if change.what == "started":
        return _event("content_block_start", index=block.index, content_block=_empty(block))
    if change.what == "grew":
        kind, field = _DELTAS[block.kind]
        return _event("content_block_delta", index=block.index, delta={"type": kind, field: change.delta})
    ending = b""
    if block.kind == "reasoning":
        delta = {"type": "signature_delta", "signature": _signature(block)}
        ending = _event("content_block_delta", index=block.index, delta=delta)
    return ending + _event("content_block_stop", index=block.index)


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _empty(block: Block) -> dict[str, Any]:
    """Returns a block as it begins."""
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": {}}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return _empty(block) | {"text": block.text}
    if block.kind == "reasoning":
        return _empty(block) | {"thinking": block.text, "signature": _signature(block)}
    return _empty(block) | {"input": object_of(block.text)}


def _signature(block: Block) -> str:
    """Returns what clients send back with the reasoning. It is not checked."""
    return hashlib.sha256(block.text.encode()).hexdigest()


def _event(kind: str, /, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
