"""Answers that are lists of blocks, one after another, for /v1/messages and /v1/responses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from foretoken.outputs import CompletionOutput, StreamPiece
from foretoken.serve.generation import Generation
from foretoken.serve.output import OutputEvent, TextDelta, ToolCallDelta, ToolCallStarted, new_call_id
from foretoken.serve.preparation import PreparedRequest
from foretoken.serve.stream import AnswerWriter

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
    def _answer(self, generation: Generation) -> Mapping[str, Any]:
        """Returns the complete answer."""

    @abstractmethod
    def _events_of(self, change: BlockChange) -> bytes:
        """Returns the events of a change."""

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
        for event in events:
            if isinstance(event, ToolCallStarted):
                changes += self._start("call", event.id, event.name)
            elif isinstance(event, ToolCallDelta):
                changes.append(self._grow(event.arguments))
            elif event.text:
                kind: BlockKind = "text" if isinstance(event, TextDelta) else "reasoning"
                if not self._open or self._blocks[-1].kind != kind:
                    changes += self._start(kind, new_call_id())
                changes.append(self._grow(event.text))
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
