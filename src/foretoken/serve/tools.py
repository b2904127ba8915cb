"""Parses function calls in a model's text while it is generated.

Two formats are recognized: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen) anywhere,
and bare JSON, ``{"name": ..., "parameters": {...}}``, that makes up the whole text (Llama 3), also several in a list.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, cast
from uuid import uuid4

from foretoken.core.errors import InvalidRequest
from foretoken.serve.chat_schema import ChatRequest, NamedTool, Tool
from foretoken.serve.errors import invalid

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)

Delta = dict[str, Any]


class ToolParser:
    """Turns text into OpenAI's deltas: ``content`` and ``tool_calls``. Text that may become a call is held back.

    Args:
        names: The functions that exist.
        bare: Whether the text consists of calls in JSON without tags.
    """

    def __init__(self, names: Collection[str], bare: bool = False) -> None:
        self._names, self._bare = set(names), bare
        self.calls = 0
        self._held = ""
        self._call: _Call | None = None
        self._tagged = False
        self._fresh = True  # only whitespace so far, so bare JSON may begin
        self._after = False  # after a call, where whitespace is ignored

    def push(self, text: str) -> list[Delta]:
        """Appends ``text``. Returns the deltas that are certain by then."""
        self._held += text
        deltas: list[Delta] = []
        while self._held and self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """Returns the deltas of the text that is still held back at the end."""
        held, call = self._held, self._call
        self._held, self._call = "", None
        if call is None:
            return [] if self._after and not held.strip(self._between) else _content(held)
        return [] if call.announced else _content((OPEN if self._tagged else "") + call.raw + held)

    def _advance(self, deltas: list[Delta]) -> bool:
        """Consumes a part of the held text. Returns whether more may be consumed."""
        if self._call is not None:
            return self._read_call(self._call, deltas)
        if self._fresh or self._after:
            return self._begin(deltas)
        before, tag, rest = self._held.partition(OPEN)
        if tag:
            deltas += _content(before)
            self._enter(rest, tagged=True)
            return True
        keep = next((n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0)
        deltas += _content(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    @property
    def _between(self) -> str | None:
        """Characters that are ignored around a call."""
        return " \r\n\t,;[]" if self._bare or (self._after and not self._tagged) else None

    def _begin(self, deltas: list[Delta]) -> bool:
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

    def _read_call(self, call: _Call, deltas: list[Delta]) -> bool:
        self._held = call.push(self._held, deltas)
        if call.ended and call.announced:
            self.calls += 1
            self._call, self._after = None, True
        elif call.ended:  # it is not a call
            deltas += _content((OPEN if self._tagged else "") + call.raw)
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

    def push(self, text: str, deltas: list[Delta]) -> str:
        """Consumes ``text``. Returns the part after the object."""
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
        self._tell(deltas)
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

    def _tell(self, deltas: list[Delta]) -> None:
        if self._name is None:
            return
        if not self.announced:
            self.announced = True
            function = {"name": self._name, "arguments": ""}
            deltas.append(_delta(self._index, {"id": new_id(), "type": "function", "function": function}))
        if len(self._arguments) > self._given:
            deltas.append(_delta(self._index, {"function": {"arguments": self._arguments[self._given :]}}))
            self._given = len(self._arguments)


def new_id() -> str:
    """Returns a new identifier of a call, in OpenAI's format."""
    return f"call_{uuid4().hex[:24]}"


def _content(text: str) -> list[Delta]:
    return [{"content": text}] if text else []


def _delta(index: int, call: dict[str, Any]) -> Delta:
    return {"tool_calls": [{"index": index, **call}]}


def message_of(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Returns the message that an answer's deltas add up to."""
    content: str | None = None
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content = (content or "") + delta["content"] if "content" in delta else content
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    content = "" if content is None and not calls else content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    return message | ({"tool_calls": calls} if calls else {})


def forced(body: ChatRequest) -> dict[str, Any] | None:
    """Returns the JSON schema of the calls that ``tool_choice`` requires; None for none. Raises ApiError."""
    tools, choice = body.tools or [], body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise invalid("tool_choice demands a call, but there are no tools", param="tool_choice")
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            names = ", ".join(tool.function.name for tool in tools)
            raise invalid(f"tool_choice names {choice.function.name!r}; tools: {names}", param="tool_choice")
        return _with_definitions(_call_schema(chosen[0]), chosen)
    each = {"anyOf": [_call_schema(tool) for tool in tools]}
    if body.parallel_tool_calls is False:
        return _with_definitions(each, tools)
    return _with_definitions({"type": "array", "minItems": 1, "items": each}, tools)


def _call_schema(tool: Tool) -> dict[str, Any]:
    name = tool.function.name
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _with_definitions(schema: dict[str, Any], tools: Sequence[Tool]) -> dict[str, Any]:
    """Returns ``schema`` with each tool's parameters as a definition, to which their references are adapted."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    definitions = {}
    for tool in tools:
        name = tool.function.name
        definitions[name] = _moved(tool.function.parameters or nothing, f"#/$defs/{name}")
    return {**schema, "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


def parsed_arguments(arguments: str) -> Any:
    """Returns a call's arguments as an object, as chat templates expect them. Raises InvalidRequest."""
    try:
        return cast("Any", json.loads(arguments)) if arguments.strip() else {}
    except ValueError as error:
        raise InvalidRequest(f"messages: the arguments of a tool call are not JSON ({error})") from error
    except RecursionError as error:
        raise InvalidRequest("messages: the arguments of a tool call are nested too deeply") from error
