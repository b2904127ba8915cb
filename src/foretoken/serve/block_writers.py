"""Answers that are lists of blocks, one after another, for /v1/messages and /v1/responses."""

import hashlib
import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from foretoken.core.verdict import KINDS
from foretoken.outputs import CompletionOutput, StreamPiece
from foretoken.serve.answer_types import AnthropicMessage, AnthropicUsage, ResponseObject
from foretoken.serve.errors import ApiError
from foretoken.serve.generation import Generation
from foretoken.serve.messages_schema import MessagesRequest
from foretoken.serve.parsers import OutputEvent, TextDelta, ToolCallDelta, ToolCallStarted, new_call_id
from foretoken.serve.parsers.values import object_of
from foretoken.serve.preparation import PreparedRequest
from foretoken.serve.responses_schema import ResponsesRequest, echoed
from foretoken.serve.stream import AnswerWriter, event
from foretoken.serve.token_text import TokenText, chat_logprobs

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """A run of text or of reasoning, or one call."""

    index: int  # its number in the output
    kind: BlockKind
    id: str  # identifier, without a prefix
    name: str = ""  # of the called function
    text: str = ""  # the text, the reasoning, or the arguments of the call


@dataclass(frozen=True, slots=True)
class BlockChange:
    """A change of a block. ``delta`` is the new text of one that grew."""

    block: Block
    what: Literal["started", "grew", "ended"]
    delta: str = ""


class BlockWriter(AnswerWriter):
    """Divides the events of one output into blocks, and writes an answer of them."""

    def __init__(self, prepared: PreparedRequest[Any]) -> None:
        self._body = prepared.body
        self._parser = prepared.output.parser()
        self._blocks: list[Block] = []
        self._open = False  # whether the last block may grow
        self._output: CompletionOutput | None = None  # once the answer is complete

    @abstractmethod
    def _answer(self, generation: Generation) -> Mapping[str, Any]: ...

    @abstractmethod
    def _events_of(self, change: BlockChange) -> bytes: ...

    def answer(self, generation: Generation, finals: Mapping[int, StreamPiece]) -> Mapping[str, Any]:
        (final,) = finals.values()
        self._output = output = final.output
        assert output is not None
        self._read(output.text, output.token_ids, output.logprobs)
        return self._answer(generation)

    def piece(self, generation: Generation, piece: StreamPiece) -> bytes:
        self._output = piece.output
        return b"".join(map(self._events_of, self._read(piece.text, piece.token_ids, piece.logprobs)))

    def _read(self, text: str, tokens: Any, logprobs: Any) -> list[BlockChange]:
        """Returns the changes that the next text of the answer makes."""
        events = self._parser.push(text, tokens)
        if self._output is None:
            return self._changes(events)
        return [*self._changes([*events, *self._parser.finish()]), *self._end()]

    def _changes(self, events: Iterable[OutputEvent]) -> list[BlockChange]:
        changes: list[BlockChange] = []
        for new in events:
            if isinstance(new, ToolCallStarted):
                changes += self._start("call", new.id, new.name)
            elif isinstance(new, ToolCallDelta):
                changes.append(self._grow(new.arguments))
            elif new.text:
                kind: BlockKind = "text" if isinstance(new, TextDelta) else "reasoning"
                if not self._open or self._blocks[-1].kind != kind:
                    changes += self._start(kind, new_call_id())
                changes.append(self._grow(new.text))
        return changes

    def _start(self, kind: BlockKind, identifier: str, name: str = "") -> list[BlockChange]:
        """Ends the last block and starts another. Returns the changes."""
        ended = self._end()
        self._blocks.append(Block(len(self._blocks), kind, identifier, name))
        self._open = True
        return [*ended, BlockChange(self._blocks[-1], "started")]

    def _grow(self, delta: str) -> BlockChange:
        self._blocks[-1].text += delta
        return BlockChange(self._blocks[-1], "grew", delta)

    def _end(self) -> list[BlockChange]:
        was_open, self._open = self._open, False
        return [BlockChange(self._blocks[-1], "ended")] if was_open else []


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
        if output is not None and output.finish_reason in KINDS:
            reason = str(output.finish_reason)
        elif output is not None and output.finish_reason == "length":
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


_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}
_TYPES = {"text": "output_text", "reasoning": "reasoning_text"}


class ResponseWriter(BlockWriter):
    """Writes a response. ``store`` is called with the finished one; ``stores`` is whether it keeps it."""

    def __init__(
        self,
        prepared: PreparedRequest[ResponsesRequest],
        token_text: TokenText,
        store: Callable[[ResponseObject], None],
        stores: bool,
    ) -> None:
        super().__init__(prepared)
        assert prepared.chat is not None
        self._chat, self._params = prepared.chat, prepared.params
        self._token_text, self._store, self._stores = token_text, store, stores
        self._logprobs: defaultdict[int, list[Any]] = defaultdict(list)  # by block
        self._sent: Counter[int] = Counter()  # number of those that were streamed, by block
        self._waiting: list[Any] = []  # of tokens whose text is still held back
        self._sequence = 0

    def opening(self, generation: Generation) -> bytes:
        response = self._response(generation, "in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def closing(self, generation: Generation) -> bytes:
        response = self._answer(generation)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, generation: Generation, error: ApiError) -> bytes:
        response = self._response(generation, "failed")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response["error"] = {"code": code, "message": error.shown}
        return self._event("response.failed", response=response)

    def _read(self, text: str, tokens: Any, logprobs: Any) -> list[BlockChange]:
        """Returns the changes of a piece. Log-probabilities go to the block of text that grows next."""
        if self._chat.logprobs:
            self._waiting += chat_logprobs(self._token_text, tokens, logprobs or (), self._chat.top_logprobs or 0)
        changes = super()._read(text, tokens, logprobs)
        if self._output is not None and not self._blocks:
            changes = [*self._start("text", new_call_id()), *self._end()]  # the conversation needs a turn of the model
        for change in changes:
            if change.what == "grew" and change.block.kind == "text":
                self._logprobs[change.block.index] += self._waiting
                self._waiting = []
        return changes

    def _answer(self, generation: Generation) -> ResponseObject:
        """Returns the complete response, and stores it."""
        reason = None if self._output is None else self._output.finish_reason
        cut = reason == "length" or reason in KINDS
        response = self._response(generation, "incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens" if reason == "length" else str(reason)}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = self._usage(generation)
        response["metrics"] = generation.speculation(self._body.return_steps)
        self._store(response)
        return response

    def _response(self, generation: Generation, status: str) -> ResponseObject:
        items = [self._item(block, self._ended(block)) for block in self._blocks]
        response = {
            "id": generation.id,
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "model": generation.model,
            "output": items,
            "store": self._stores,
            **echoed(self._body, self._params),
        }
        return cast("ResponseObject", response)

    def _ended(self, block: Block) -> str:
        output, last = self._output, block is self._blocks[-1]
        cut = block.kind == "call" and self._parser.cut
        if last and (output is None or output.finish_reason != "stop" or cut):
            return "incomplete"
        return "completed"

    def _item(self, block: Block, status: str, empty: bool = False) -> dict[str, Any]:
        """Returns the output item of a block. empty: without its content, as it begins."""
        base = {"id": _PREFIXES[block.kind] + block.id, "status": status}
        text = "" if empty else block.text
        if block.kind == "call":
            call = {"type": "function_call", "call_id": f"call_{block.id}", "name": block.name, "arguments": text}
            return base | call
        content = [] if empty else [self._part(block)]
        if block.kind == "reasoning":
            return base | {"type": "reasoning", "summary": [], "content": content}
        return base | {"type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block, empty: bool = False) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _TYPES[block.kind], "text": "" if empty else block.text}
        if block.kind == "text":
            part |= {"annotations": [], "logprobs": [] if empty else self._logprobs[block.index]}
        return part

    def _events_of(self, change: BlockChange) -> bytes:
        block = change.block
        place = {"item_id": _PREFIXES[block.kind] + block.id, "output_index": block.index}
        if change.what == "started":
            item = self._item(block, "in_progress", empty=True)
            events = self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind == "call":
                return events
            part = self._part(block, empty=True)
            return events + self._event("response.content_part.added", **place, content_index=0, part=part)
        name = "function_call_arguments" if block.kind == "call" else _TYPES[block.kind]
        within: dict[str, Any] = place if block.kind == "call" else place | {"content_index": 0}
        if change.what == "grew":
            if block.kind == "text":  # those that no event has had yet
                logprobs, sent = self._logprobs[block.index], self._sent[block.index]
                within, self._sent[block.index] = within | {"logprobs": logprobs[sent:]}, len(logprobs)
            return self._event(f"response.{name}.delta", **within, delta=change.delta)
        if block.kind == "call":
            events = self._event(f"response.{name}.done", **within, arguments=block.text)
        else:
            if block.kind == "text":
                within["logprobs"] = self._logprobs[block.index]
            events = self._event(f"response.{name}.done", **within, text=block.text)
            within.pop("logprobs", None)
            events += self._event("response.content_part.done", **within, part=self._part(block))
        item = self._item(block, self._ended(block) if self._output is not None else "completed")
        return events + self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        number = self._sequence
        self._sequence += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _usage(self, generation: Generation) -> dict[str, Any]:
        usage = generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
