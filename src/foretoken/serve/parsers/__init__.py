"""Parsers of reasoning and function calls in generated text, by model family, and their events.

A parser turns the text into events while it is generated, and each API renders them in its own way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
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


class OutputParser:
    """Parses the output of one choice while it is generated. This class takes everything for text.

    ``source`` has the calls: another parser, or a writer of calls.
    """

    def __init__(self, source: Any = None) -> None:
        self._source = source
        self.reasoning_tokens = 0  # so far

    @property
    def calls(self) -> int:
        return 0 if self._source is None else int(self._source.calls)

    @property
    def cut(self) -> bool:
        """Whether the output ended within the arguments of a call."""
        return self._source is not None and bool(self._source.cut)

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[OutputEvent]:
        """Returns the events that are certain after ``text``, whose tokens are ``tokens``."""
        return [TextDelta(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        """Returns the events of the text that is still held back at the end."""
        return []


def new_call_id() -> str:
    """Returns a new identifier of a call, without a prefix."""
    return uuid4().hex[:24]
