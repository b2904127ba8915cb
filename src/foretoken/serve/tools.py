"""Parses function calls in a model's text while it is generated.

Two formats are recognized: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen) anywhere,
and bare JSON, ``{"name": ..., "parameters": {...}}``, that makes up the whole text (Llama 3), also several in a list.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from foretoken.serve.output import (
    OutputEvent,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    new_call_id,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


class ToolParser:
    """An ``OutputParser`` of both formats. Text that may become a call is held back.

    Args:
        names: The functions that exist.
        bare: Whether the text consists of calls in JSON without tags.
    """

    def __init__(self, names: Collection[str], bare: bool = False) -> None:
        self._names, self._bare = set(names), bare
        self.calls = self.reasoning_tokens = 0
        self._held = ""
        self._call: _Call | None = None
        self._tagged = False
        self._fresh = True  # only whitespace so far, so bare JSON may begin
        self._after = False  # after a call, where whitespace is ignored

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[OutputEvent]:
        """See ``OutputParser``."""
        self._held += text
        events: list[OutputEvent] = []
        while self._held and self._advance(events):
            pass
        return events

    def finish(self) -> list[OutputEvent]:
        """See ``OutputParser``."""
        held, call = self._held, self._call
        self._held, self._call = "", None
        if call is None:
            return [] if self._after and not held.strip(self._between) else _text(held)
        return [] if call.announced else _text((OPEN if self._tagged else "") + call.raw + held)

    def _advance(self, events: list[OutputEvent]) -> bool:
        """Consumes a part of the held text. Returns whether more may be consumed."""
        if self._call is not None:
            return self._read_call(self._call, events)
        if self._fresh or self._after:
            return self._begin(events)
        before, tag, rest = self._held.partition(OPEN)
        if tag:
            events += _text(before)
            self._enter(rest, tagged=True)
            return True
        keep = next((n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0)
        events += _text(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    @property
    def _between(self) -> str | None:
        """Characters that are ignored around a call."""
        return " \r\n\t,;[]" if self._bare or (self._after and not self._tagged) else None

    def _begin(self, events: list[OutputEvent]) -> bool:
        """Consumes text at a place where a call may begin. Returns whether more may be consumed."""
        start = self._held.lstrip(self._between)
        if start.startswith(OPEN):
            self._enter(start[len(OPEN) :], tagged=True)
        elif self._after and self._tagged and start.startswith(CLOSE):
            self._held = start[len(CLOSE) :]
        elif start.startswith("{") and not (self._after and self._tagged):
            self._enter(start, tagged=False)
        elif any(tag.startswith(start) for tag in (OPEN, CLOSE)):
            return False  # not enough text to decide
        else:
            self._fresh = self._after = False
        return True

    def _enter(self, rest: str, tagged: bool) -> None:
        self._held, self._tagged, self._fresh, self._after = rest, tagged, False, False
        self._call = _Call(self.calls, self._names, strict=not (tagged or self._bare))

    def _read_call(self, call: _Call, events: list[OutputEvent]) -> bool:
        self._held = call.push(self._held, events)
        if call.ended and call.announced:
            self.calls += 1
            self._call, self._after = None, True
        elif call.ended:  # it is not a call
            events += _text((OPEN if self._tagged else "") + call.raw)
            self._call = None
        return call.ended


class _Call:
    """Parses one call's JSON object, character by character.

    Attributes:
        raw: The text consumed so far.
        announced: Whether the name was sent.
        ended: Whether the object is complete, or cannot be a call.
        strict: Whether only existing functions and the keys of a call are accepted.
    """

    def __init__(self, index: int, names: Collection[str], strict: bool) -> None:
        self._index, self._names, self._strict = index, names, strict
        self.raw, self.announced, self.ended = "", False, False
        self._begun, self._depth, self._quoted, self._escaped = False, 0, False, False
        self._key: str | None = None
        self._part = ""  # text of the current key or value
        self._name: str | None = None
        self._arguments, self._given = "", 0  # and how many characters of them were sent

    def push(self, text: str, events: list[OutputEvent]) -> str:
        """Consumes ``text``. Returns the rest behind the object."""
        rest = ""
        for place, character in enumerate(text):
            self.raw += character
            try:
                self._take(character)
            except ValueError:
                self.ended = True
            if self.ended:
                rest = text[place + 1 :]
                break
        if self._key in _ARGUMENTS and self._part.lstrip().startswith("{"):
            self._arguments = self._part.strip()
        self._tell(events)
        return rest

    def _take(self, character: str) -> None:
        """Consumes one character. Raises ValueError if the text is not a call's JSON."""
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        if not self._begun:
            self._begun = character == "{"
            if not (self._begun or character.isspace()):
                raise ValueError
            return
        at_top = self._depth <= 1 and not self._quoted
        if at_top and character == ":" and self._key is None:
            self._begin_value(json.loads(self._part))
        elif at_top and (not self._depth or character == ","):
            self._end_value()
            self.ended = not self._depth
        else:
            self._part += character

    def _begin_value(self, key: Any) -> None:
        if self._strict and key not in _KEYS:
            raise ValueError
        self._key, self._part = key, ""

    def _end_value(self) -> None:
        value = self._part.strip()
        if self._key == "name":
            name = json.loads(value)
            if not isinstance(name, str) or (self._strict and name not in self._names):
                raise ValueError
            self._name = name
        elif self._key in _ARGUMENTS:
            given = value if value.startswith("{") else json.loads(value)
            self._arguments = given if isinstance(given, str) else "{}"
        self._key, self._part = None, ""

    def _tell(self, events: list[OutputEvent]) -> None:
        if self._name is None:
            return
        if not self.announced:
            self.announced = True
            events.append(ToolCallStarted(self._index, new_call_id(), self._name))
        if len(self._arguments) > self._given:
            events.append(ToolCallDelta(self._index, self._arguments[self._given :]))
            self._given = len(self._arguments)


def _text(text: str) -> list[OutputEvent]:
    return [TextDelta(text)] if text else []
