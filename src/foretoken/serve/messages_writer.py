"""Answers of POST /v1/messages: the message, and its events in Anthropic's order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from foretoken.serve.answer_types import AnthropicMessage, AnthropicUsage
from foretoken.serve.block_writer import Block, BlockChange, BlockWriter
from foretoken.serve.errors import ApiError
from foretoken.serve.generation import Generation
from foretoken.serve.messages_schema import MessagesRequest
from foretoken.serve.parsers.values import object_of
from foretoken.serve.preparation import PreparedRequest
from foretoken.serve.stream import event

_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageWriter(BlockWriter):
    """Writes a message."""

    def __init__(self, prepared: PreparedRequest[MessagesRequest], request_id: str | None) -> None:
        super().__init__(prepared)
        self._cut, self._request_id = prepared.cut, request_id

    def opening(self, generation: Generation) -> bytes:
        message = self._message(generation, [])
        message["usage"]["output_tokens"] = 0
        return _event("message_start", message=message) + _event("ping")

    def closing(self, generation: Generation) -> bytes:
        metrics = generation.speculation(self._body.return_steps)
        last = _event("message_delta", delta=self._stop(), usage=_usage(generation), metrics=metrics)
        return last + _event("message_stop")

    def failure(self, generation: Generation, error: ApiError) -> bytes:
        return event(error.anthropic_body(self._request_id), "error")

    def _answer(self, generation: Generation) -> Mapping[str, Any]:
        message = self._message(generation, [_shown(block, block.text) for block in self._blocks])
        return message | self._stop() | {"metrics": generation.speculation(self._body.return_steps)}

    def _events_of(self, change: BlockChange) -> bytes:
        block = change.block
        if change.what == "started":
            return _event("content_block_start", index=block.index, content_block=_shown(block))
        if change.what == "grew":
            kind, field = _DELTAS[block.kind]
            return _event("content_block_delta", index=block.index, delta={"type": kind, field: change.delta})
        ending = b""
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": _signature(block.text)}
            ending = _event("content_block_delta", index=block.index, delta=delta)
        return ending + _event("content_block_stop", index=block.index)

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
        """Returns the reason of the end, by Anthropic's names."""
        output, parser = self._output, self._parser
        reason = "end_turn"
        stop_sequence: str | None = None
        if output is not None and output.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._cut else "max_tokens"
        elif output is not None and isinstance(output.stop_reason, str) and (parser.cut or not parser.calls):
            reason, stop_sequence = "stop_sequence", output.stop_reason
        elif parser.calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop_sequence}


def _usage(generation: Generation) -> AnthropicUsage:
    usage = generation.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _shown(block: Block, text: str = "") -> dict[str, Any]:
    """Returns a block with ``text``; without, as it begins."""
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": _signature(text) if text else ""}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": object_of(text)}


def _signature(reasoning: str) -> str:
    """Returns the signature that clients send back with the reasoning. It is not checked."""
    return hashlib.sha256(reasoning.encode()).hexdigest()


def _event(kind: str, /, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
