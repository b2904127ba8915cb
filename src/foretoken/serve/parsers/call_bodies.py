"""Bodies of function calls, in the forms in which models write them.

A body reads the text behind the tag that opens a call. It raises ``ValueError`` where the text is no call.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from foretoken.serve.parsers import OutputEvent, ToolCallDelta, ToolCallStarted, new_call_id
from foretoken.serve.parsers.values import ValueEnd, dumps, is_unicode, split_at, typed

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each function, by its name."""


_CONSTANTS = {"true": True, "false": False, "null": None}
_GEMMA_WORDS = re.compile(r'<\|"\|>(.*?)<\|"\|>|([^\s,:{}\[\]<"]+)\s*(?=:)', re.DOTALL)  # strings and keys
_PYTHON_HEAD = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(|\Z)|\Z)")
_LONGEST_HEAD = 1000  # characters in which the name of a function must have come

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*(?=\S)', re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[^\s,}]+(?=[\s,}])")


class CallWriter:
    """Collects the events of calls."""

    def __init__(self, schemas: Schemas) -> None:
        self.schemas = schemas
        self.calls = 0
        self.events: list[OutputEvent] = []
        self._arguments: list[str] = []  # of the last call

    def take(self) -> list[OutputEvent]:
        """Returns the events since the last time."""
        events, self.events = self.events, []
        return events

    @property
    def cut(self) -> bool:
        """Whether the arguments of the last call are not complete JSON."""
        try:
            json.loads("".join(self._arguments) if self.calls else "{}")
        except RecursionError:
            return False
        except ValueError:
            return True
        return False

    def start(self, name: str) -> None:
        self._arguments = []
        self.events.append(ToolCallStarted(self.calls, new_call_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the last call."""
        if text:
            self._arguments.append(text)
            self.events.append(ToolCallDelta(self.calls - 1, text))

    def call(self, name: str, arguments: Any) -> None:
        self.start(name)
        self.arguments(dumps(arguments))


class CallBody(Protocol):
    """Reads one call, or several that stand together."""

    started: bool
    """Whether the name of a function was written: from then on the text is a call, even where it is cut off."""

    def push(self, text: str) -> str | None:
        """Returns the text behind the body once it is complete, None until then. Raises ValueError."""
        ...


class HeadBody:
    """A head that names the function, and the arguments in JSON: DeepSeek, Kimi, Mistral.

    ``name`` returns the function's name from the head, which ends before the arguments' ``{``. It raises ValueError.
    """

    def __init__(self, writer: CallWriter, name: Callable[[str], str]) -> None:
        self._writer, self._name = writer, name
        self._head, self._end = "", ValueEnd()
        self.started = False

    def push(self, text: str) -> str | None:
        if not self.started:
            head, brace, text = text.partition("{")
            self._head += head
            if len(self._head) > _LONGEST_HEAD:
                raise ValueError("no arguments")
            if not brace:
                return None
            self._writer.start(self._name(self._head))
            self.started, text = True, brace + text
        length = self._end.push(text) if text else -1
        self._writer.arguments(text if length < 0 else text[:length])
        return None if length < 0 else text[length:]


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """A format in which parameters are written one by one.

    The pattern ``parameter`` of the tag before a value has the groups ``name``, and ``string`` where the tag says
    whether the value is one ("true" or "false").
    """

    name: re.Pattern[str]  # of the function, with a group; matches at the beginning of the body
    parameter: re.Pattern[str]
    value_end: str  # tag behind a value
    end: str  # tag behind the last parameter
    newlines: bool = False  # whether a value stands on lines of its own, whose line breaks do not belong to it


class ParameterBody:
    """Parameters between tags, typed by the function's schema: Qwen3-Coder, GLM, DeepSeek 3.2, MiniMax, Seed-OSS."""

    def __init__(self, writer: CallWriter, tags: ParameterTags) -> None:
        self._writer, self._tags = writer, tags
        self._held, self._value = "", ""
        self._schema: Mapping[str, Any] = {}
        self._parameter: re.Match[str] | None = None
        self._count = 0
        self.started = False

    def push(self, text: str) -> str | None:
        self._held += text
        if not self.started and not self._start():
            return None
        while True:
            if self._parameter is not None:
                if not self._read_value():
                    return None
                continue
            self._held = self._held.lstrip()
            if self._held.startswith(self._tags.end):
                self._writer.arguments("{}" if not self._count else "}")
                return self._held[len(self._tags.end) :]
            self._parameter = self._tags.parameter.match(self._held)
            if self._parameter is not None:
                self._held = self._held[self._parameter.end() :]
            elif self._held[:1] in ("", "<") and len(self._held) < _LONGEST_HEAD:
                return None
            else:  # neither a parameter nor the end
                self._held = self._held[max(1, self._held.find("<")) :]

    def _start(self) -> bool:
        match = self._tags.name.match(self._held)
        if match is None:
            if len(self._held) > _LONGEST_HEAD:
                raise ValueError("no name of a function")
            return False
        name = match.group(1).strip()
        if not name:
            raise ValueError("no name of a function")
        properties = self._writer.schemas.get(name, {}).get("properties")
        self._schema = properties if isinstance(properties, Mapping) else {}
        self._writer.start(name)
        self._held, self.started = self._held[match.end() :], True
        return True

    def _read_value(self) -> bool:
        """Moves the value out of the held text. Returns whether it is complete."""
        text, mark, self._held = split_at(self._held, (self._tags.value_end,))
        self._value += text
        if not mark:
            return False
        value, self._value = self._value, ""
        if self._tags.newlines:
            value = value.removeprefix("\n").removesuffix("\n")
        assert self._parameter is not None
        groups, self._parameter = self._parameter.groupdict(), None
        name = groups["name"].strip()
        schema = self._schema.get(name)
        if groups.get("string") is not None:
            schema = {"type": "string"} if groups["string"] == "true" else schema or {"type": "object"}
        separator = "{" if not self._count else ", "
        self._count += 1
        self._writer.arguments(f"{separator}{dumps(name)}: {dumps(typed(value, schema))}")
        return True


Calls = list[tuple[str, dict[str, Any]]]


class WholeBody:
    """Text that is read at once when the tag ``end`` completes it: Gemma 4.

    ``read`` returns the calls in the text, each a name and its arguments. It raises ValueError.
    """

    def __init__(self, writer: CallWriter, end: str, read: Callable[[str], Calls]) -> None:
        self._writer, self._end, self._read = writer, end, read
        self._text, self._held = "", ""
        self.started = False

    def push(self, text: str) -> str | None:
        body, mark, self._held = split_at(self._held + text, (self._end,))
        self._text += body
        if not mark:
            return None
        for name, arguments in self._read(self._text):
            self._writer.call(name, arguments)
        self.started = True
        return self._held


class PythonBody:
    """A list of Python calls with keyword arguments, ``[f(a=1), g(b="x")]``: Llama 4 and others."""

    def __init__(self, writer: CallWriter) -> None:
        self._writer, self._text = writer, ""
        self._end = ValueEnd("\"'", "([{", ")]}")
        self.started = False

    def push(self, text: str) -> str | None:
        if not self._text:
            text = text.lstrip()
        if not text:
            return None
        length = self._end.push(text)
        self._text += text if length < 0 else text[:length]
        if not _PYTHON_HEAD.match(self._text):
            raise ValueError("no list of calls")
        if length < 0:
            return None
        calls = python_calls(self._text)
        if not self._writer.schemas.keys() >= {name for name, _ in calls}:
            raise ValueError("no function")
        for name, arguments in calls:
            self._writer.call(name, arguments)
        self.started = True
        return text[length:]


def python_calls(text: str) -> Calls:
    """Returns the calls in a Python list of calls whose arguments are literals. Raises ValueError."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise ValueError("no list of calls")
        return [_python_call(call) for call in tree.elts]
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(f"no list of calls: {error}") from error


def _python_call(tree: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(tree, ast.Call) or tree.args:
        raise ValueError("no call with keyword arguments")
    arguments = {}
    for keyword in tree.keywords:
        if keyword.arg is None:
            raise ValueError("no call with keyword arguments")
        arguments[keyword.arg] = _json_literal(keyword.value)
    return ast.unparse(tree.func), arguments


def _json_literal(tree: ast.expr | None) -> Any:
    """Returns the value of a literal, in which JSON's names of constants are allowed. Raises ValueError."""
    if isinstance(tree, ast.Name) and tree.id in _CONSTANTS:
        return _CONSTANTS[tree.id]
    if isinstance(tree, ast.List | ast.Tuple):
        return [_json_literal(item) for item in tree.elts]
    if isinstance(tree, ast.Dict):
        pairs = zip(tree.keys, tree.values, strict=True)
        return {str(_json_literal(key)): _json_literal(value) for key, value in pairs}
    if tree is None:  # in place of the key before **
        raise ValueError("no literal")
    value = ast.literal_eval(tree)
    dumps(value)  # raises TypeError for values that JSON does not have
    return value


def gemma_calls(text: str) -> Calls:
    """Returns the call in Gemma 4's form, ``call:name{key:<|"|>text<|"|>,count:2}``. Raises ValueError."""
    head, brace, body = text.strip().partition("{")
    kind, _, name = head.partition(":")
    if kind != "call" or not name or not brace:
        raise ValueError("no call")
    arguments = json.loads("{" + _GEMMA_WORDS.sub(lambda m: dumps(m[1] if m[2] is None else m[2]), body))
    return [(name.strip(), arguments)]


class JsonBody:
    """One call, or a list of calls in brackets. Arguments are passed on while they are generated.

    A ``strict`` one accepts only existing functions and the keys of a call, because other JSON may stand here as well.
    """

    def __init__(self, writer: CallWriter, strict: bool = False) -> None:
        self._writer, self._strict = writer, strict
        self._held = ""
        self._call: _Call | None = None
        self._listed = False
        self.started = False

    def push(self, text: str) -> str | None:
        self._held += text
        while True:
            if self._call is not None:
                rest = self._read(self._call)
                self._held = rest or ""
                if rest is None:
                    return None
                self._call = None
                if not self._listed:
                    return self._held
            self._held = self._held.lstrip(" \r\n\t," if self._listed else None)
            if not self._held:
                return None
            first, self._held = self._held[0], self._held[1:]
            if first == "{":
                self._call = _Call(self._writer, self._strict)
            elif first == "[" and not self._listed:
                self._listed = True
            elif first == "]" and self._listed and self.started:
                return self._held
            elif self.started:
                return first + self._held
            else:
                raise ValueError("no JSON object")

    def _read(self, call: "_Call") -> str | None:
        """Returns the text behind the object, or from the malformed place on. None if it is not complete."""
        try:
            return call.push(self._held)
        except ValueError:
            if call.name is None and not self.started:
                raise
            self._listed = False
            return call.unread
        finally:
            self.started = self.started or call.name is not None


class _Call:
    """Reads one object behind its opening brace.

    Attributes:
        name: The function's name, once it was read.
        unread: Text that is not read yet.
    """

    def __init__(self, writer: CallWriter, strict: bool) -> None:
        self._writer, self._strict = writer, strict
        self.unread = ""
        self._key: str | None = None  # the key whose value follows
        self._end: ValueEnd | None = None  # within an object or a list
        self._waiting: list[str] | None = []  # arguments before the name, None behind it
        self._given = False
        self.name: str | None = None

    def push(self, text: str) -> str | None:
        """Returns the text behind the object, None if it is not complete. Raises ValueError."""
        self.unread += text
        while True:
            if self._end is not None:
                if not self._read_brackets(self._end):
                    return None
            elif self._key is not None:
                if not self._read_value(self._key):
                    return None
            elif (match := _KEY.match(self.unread)) is not None:
                self._key, self.unread = json.loads(match[1]), self.unread[match.end() :]
                if self._strict and self._key not in _KEYS:
                    raise ValueError("no call")
            else:
                start = self.unread.lstrip(" \r\n\t,")
                if start.startswith("}"):
                    self._finish()
                    return start[1:]
                string = _STRING.match(start)
                behind = start[string.end() :].lstrip() if string else ""
                if (start and not start.startswith('"')) or behind[:1] not in ("", ":"):
                    raise ValueError("no JSON object")
                return None

    def _read_value(self, key: str) -> bool:
        """Reads a value, or the beginning of one in brackets. Returns whether it went on."""
        if self.unread[:1] in ("{", "["):
            if key == "name":
                raise ValueError("the name is no string")
            self._end = ValueEnd()
            return True
        pattern = _STRING if self.unread.startswith('"') else _SCALAR
        match = pattern.match(self.unread)
        if match is None:
            return False
        value = json.loads(match[0])
        self.unread, self._key = self.unread[match.end() :], None
        if key == "name":
            self._take_name(value)
        elif key in _ARGUMENTS:
            self._take_arguments(value if isinstance(value, str) and is_unicode(value) else "{}")
        return True

    def _read_brackets(self, end: ValueEnd) -> bool:
        if not self.unread:
            return False
        length = end.push(self.unread)
        text, self.unread = (self.unread, "") if length < 0 else (self.unread[:length], self.unread[length:])
        if self._key in _ARGUMENTS:
            self._take_arguments(text)
        if length < 0:
            return False
        self._key = self._end = None
        return True

    def _take_name(self, name: object) -> None:
        if not isinstance(name, str) or not is_unicode(name) or (self._strict and name not in self._writer.schemas):
            raise ValueError("no function")
        if self.name is not None:
            return
        self.name = name
        self._writer.start(name)
        waiting, self._waiting = self._waiting or [], None
        self._writer.arguments("".join(waiting))

    def _take_arguments(self, text: str) -> None:
        self._given = True
        if self._waiting is None:
            self._writer.arguments(text)
        else:
            self._waiting.append(text)

    def _finish(self) -> None:
        if self.name is None:
            raise ValueError("no name of a function")
        if not self._given:
            self._writer.arguments("{}")
