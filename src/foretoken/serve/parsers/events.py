"""What generated text consists of: content, reasoning and function calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A function call, whose arguments follow.

    Attributes:
        index: Number of the call in the answer, from 0.
        name: Name of the function.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. All pieces of a complete call together are a JSON object."""

    index: int
    text: str


Event = Content | Reasoning | CallStarted | CallArguments


class OutputParser(Protocol):
    """Turns generated text into events while it is generated. The events do not depend on how the text is cut.

    Attributes:
        calls: Number of function calls so far.
    """

    @property
    def calls(self) -> int: ...

    def push(self, text: str) -> list[Event]:
        """Returns the events that are certain after ``text``."""
        ...

    def finish(self) -> list[Event]:
        """Returns the events of the text that is still held back at the end."""
        ...


def split_held(text: str, tags: tuple[str, ...]) -> tuple[str, str]:
    """Returns ``text`` without, and only, its longest end that begins one of ``tags``."""
    longest = max(map(len, tags), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(tag.startswith(end) for tag in tags):
            return text[:-length], end
    return text, ""


def find_tag(text: str, tags: tuple[str, ...], start: int = 0) -> tuple[int, str]:
    """Returns the place of the first of ``tags`` in ``text`` and the tag, the longest of those there; -1 for none."""
    places = [(place, -len(tag), tag) for tag in tags if (place := text.find(tag, start)) >= 0]
    if not places:
        return -1, ""
    place, _, tag = min(places)
    return place, tag
