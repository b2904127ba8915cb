"""Answers of POST /v1/responses: the response object, and its events in OpenAI's order."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, cast

from foretoken.serve.answer_types import ResponseObject
from foretoken.serve.block_writer import Block, BlockChange, BlockWriter
from foretoken.serve.errors import ApiError
from foretoken.serve.generation import Generation
from foretoken.serve.output import new_call_id
from foretoken.serve.preparation import PreparedRequest
from foretoken.serve.responses_schema import ResponsesRequest, echoed
from foretoken.serve.stream import event
from foretoken.serve.token_text import TokenText, chat_logprobs

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
        cut = self._output is not None and self._output.finish_reason == "length"
        response = self._response(generation, "incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
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
