"""What a model's text consists of: text, reasoning and tool calls, as events that each API renders in its own way.

A parser of the model's family (``parsers``) turns the text into events while it is generated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from uuid import uuid4


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A call begins. Calls are numbered from 0. ``id`` is unique; each API puts its own prefix before it."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call's arguments, which are JSON."""

    index: int
    arguments: str


OutputEvent = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta


class OutputParser(Protocol):
    """Parses the output of one choice while it is generated."""

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of the reasoning so far."""
        ...

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        ...

    @property
    def cut(self) -> bool:
        """Whether the output ended within the arguments of a call."""
        ...

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[OutputEvent]:
        """Returns the events that are certain after ``text``, whose tokens are ``tokens``."""
        ...

    def finish(self) -> list[OutputEvent]:
        """Returns the events of what is still held back at the end."""
        ...


class TextParser:
    """An ``OutputParser`` for requests without tools: everything is text."""

    calls = 0
    reasoning_tokens = 0
    cut = False

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[OutputEvent]:
        """See ``OutputParser``."""
        return [TextDelta(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        """See ``OutputParser``."""
        return []


def new_call_id() -> str:
    """Returns a new identifier of a call, without a prefix."""
    return uuid4().hex[:24]


@dataclass(slots=True)
class Block:
    """A run of text or of reasoning, or one call.

    Args:
        index: Its number in the output.
        kind: What it is.
        text: The text, the reasoning, or the arguments of the call.
        id: Identifier, without a prefix.
        name: Name of the called function.
    """

    index: int
    kind: Literal["text", "reasoning", "call"]
    id: str
    text: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class BlockChange:
    """What happened to a block. ``delta`` is the new text of one that grew."""

    block: Block
    what: Literal["started", "grew", "ended"]
    delta: str = ""


class Blocks:
    """Divides the events of one output into blocks, one after another, for APIs whose answers are lists of blocks."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def add(self, events: Iterable[OutputEvent]) -> list[BlockChange]:
        """Returns the changes that the events make."""
        changes: list[BlockChange] = []
        for event in events:
            if isinstance(event, ToolCallStarted):
                changes += [*self.end(), self._start("call", event.id, event.name)]
            elif isinstance(event, ToolCallDelta):
                changes.append(self._grow(event.arguments))
            elif event.text:
                kind: Literal["text", "reasoning"] = "text" if isinstance(event, TextDelta) else "reasoning"
                if not self._open or self.all[-1].kind != kind:
                    changes += [*self.end(), self._start(kind, new_call_id())]
                changes.append(self._grow(event.text))
        return changes

    def start_text(self) -> list[BlockChange]:
        """Starts a block of text. Returns the change."""
        return [self._start("text", new_call_id())]

    def end(self) -> list[BlockChange]:
        """Ends the last block. Returns the change."""
        if not self._open:
            return []
        self._open = False
        return [BlockChange(self.all[-1], "ended")]

    def _start(self, kind: Literal["text", "reasoning", "call"], identifier: str, name: str = "") -> BlockChange:
        self.all.append(Block(len(self.all), kind, identifier, name=name))
        self._open = True
        return BlockChange(self.all[-1], "started")

    def _grow(self, delta: str) -> BlockChange:
        self.all[-1].text += delta
        return BlockChange(self.all[-1], "grew", delta)
