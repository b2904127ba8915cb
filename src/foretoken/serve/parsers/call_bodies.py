"""Bodies of function calls, in the forms in which models write them.

A body reads the text behind the tag that opens a call, as a generator to which the text is sent while it is generated.
It raises ``ValueError`` where the text is no call. Once it has begun a call, the text is one, even if it is cut off.
"""

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.serve.parsers import OutputEvent, ToolCallDelta, ToolCallStarted, new_call_id
from foretoken.serve.parsers.values import bracketed, dumps, is_unicode, typed, up_to

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


Reading = Generator[None, str, str]
"""Reads one call, or several that stand together, in text that is sent to it. Returns the text behind them."""

CallBody = Callable[[CallWriter], Reading]


def head_body(writer: CallWriter, head: re.Pattern[str], text: str = "") -> Reading:
    """Reads a head that names the function, and the arguments in JSON: DeepSeek, Kimi, Mistral.

    ``head`` matches the text before the arguments' ``{``; one of its groups is the function's name.
    """
    while "{" not in text and len(text) <= _LONGEST_HEAD:
        text += yield
    before, brace, rest = text.partition("{")
    match = head.match(before) if len(before) <= _LONGEST_HEAD else None
    name = next(filter(None, match.groups()), "").strip() if match else ""
    if not name:
        raise ValueError("no name of a function")
    writer.start(name)
    return (yield from bracketed(brace + rest, writer.arguments))


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


def parameter_body(writer: CallWriter, tags: ParameterTags) -> Reading:
    """Reads parameters between tags, typed by the schema: Qwen3-Coder, GLM, DeepSeek 3.2, MiniMax, Seed-OSS."""
    text, count = "", 0
    while (match := tags.name.match(text)) is None:
        if len(text) > _LONGEST_HEAD:
            raise ValueError("no name of a function")
        text += yield
    if not (name := match[1].strip()):
        raise ValueError("no name of a function")
    properties = writer.schemas.get(name, {}).get("properties")
    schemas: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    writer.start(name)
    text = text[match.end() :]
    while not (text := text.lstrip()).startswith(tags.end):
        if (match := tags.parameter.match(text)) is not None:
            parts: list[str] = []
            text = yield from up_to(text[match.end() :], tags.value_end, parts.append)
            parameter = _parameter(match.groupdict(), "".join(parts), tags, schemas)
            writer.arguments(f"{', ' if count else '{'}{parameter}")
            count += 1
        elif text[:1] in ("", "<") and len(text) < _LONGEST_HEAD:
            text += yield
        else:  # neither a parameter nor the end
            text = text[max(1, text.find("<")) :]
    writer.arguments("}" if count else "{}")
    return text[len(tags.end) :]


def _parameter(tag: Mapping[str, str | None], value: str, tags: ParameterTags, schemas: Mapping[str, Any]) -> str:
    """Returns a member of the arguments. tag: the groups of ``tags.parameter``."""
    name = str(tag["name"]).strip()
    schema = schemas.get(name)
    if tag.get("string") is not None:
        schema = {"type": "string"} if tag["string"] == "true" else schema or {"type": "object"}
    if tags.newlines:
        value = value.removeprefix("\n").removesuffix("\n")
    return f"{dumps(name)}: {dumps(typed(value, schema))}"


def python_body(writer: CallWriter) -> Reading:
    """Reads a list of Python calls with keyword arguments, ``[f(a=1), g(b="x")]``: Llama 4 and others."""
    listed = text = ""

    def take(piece: str) -> None:
        nonlocal listed
        listed += piece
        if not _PYTHON_HEAD.match(listed):
            raise ValueError("no list of calls")

    while not (text := text.lstrip()):
        text = yield
    rest = yield from bracketed(text, take, "\"'", "([{", ")]}")
    calls = python_calls(listed)
    if not writer.schemas.keys() >= {name for name, _ in calls}:
        raise ValueError("no function")
    for name, arguments in calls:
        writer.call(name, arguments)
    return rest


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
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


def gemma_body(writer: CallWriter) -> Reading:
    """Reads a call of Gemma 4, ``call:name{key:<|"|>text<|"|>,count:2}<tool_call|>``, once it is complete."""
    parts: list[str] = []
    rest = yield from up_to("", "<tool_call|>", parts.append)
    head, brace, body = "".join(parts).strip().partition("{")
    kind, _, name = head.partition(":")
    if kind != "call" or not name or not brace:
        raise ValueError("no call")
    arguments = json.loads("{" + _GEMMA_WORDS.sub(lambda m: dumps(m[1] if m[2] is None else m[2]), body))
    writer.call(name.strip(), arguments)
    return rest


def json_body(writer: CallWriter, strict: bool = False, text: str = "") -> Reading:
    """Reads one call, or a list of calls in brackets. Arguments are passed on while they are generated.

    If ``strict``, only existing functions and the keys of a call are accepted, as other JSON may stand here as well.
    """
    before, listed = writer.calls, False
    while True:
        text = text.lstrip(" \r\n\t," if listed else None)
        first, text = text[:1], text[1:]
        if not first:
            text = yield
        elif first == "{":
            text, complete = yield from _json_call(writer, strict, text, before)
            if not listed or not complete:
                return text
        elif first == "[" and not listed:
            listed = True
        elif writer.calls > before:
            return text if first == "]" and listed else first + text
        else:
            raise ValueError("no JSON object")


def _json_call(writer: CallWriter, strict: bool, text: str, before: int) -> Generator[None, str, tuple[str, bool]]:
    """Reads one object behind its opening brace. Returns the text behind it, or from the malformed place on.

    The second result is whether the object is complete. before: calls before the body, without any of its own it raises
    ValueError.
    """
    named = given = False
    waiting: list[str] = []  # arguments before the name

    def take(arguments: str) -> None:
        nonlocal given
        given = True
        if named:
            writer.arguments(arguments)
        else:
            waiting.append(arguments)

    try:
        while not (start := text.lstrip(" \r\n\t,")).startswith("}"):
            if (match := _KEY.match(text)) is None:
                string = _STRING.match(start)
                behind = start[string.end() :].lstrip() if string else ""
                if (start and not start.startswith('"')) or behind[:1] not in ("", ":"):
                    raise ValueError("no JSON object")
                text += yield
                continue
            key, text = json.loads(match[1]), text[match.end() :]
            if (strict and key not in _KEYS) or (key == "name" and text[0] in "{["):
                raise ValueError("no call")
            if text[0] in "{[":
                text = yield from bracketed(text, take if key in _ARGUMENTS else lambda piece: None)
                continue
            pattern = _STRING if text[0] == '"' else _SCALAR
            while (match := pattern.match(text)) is None:
                text += yield
            value, text = json.loads(match[0]), text[match.end() :]
            if key in _ARGUMENTS:
                take(value if isinstance(value, str) and is_unicode(value) else "{}")
            elif key == "name":
                if not isinstance(value, str) or not is_unicode(value) or (strict and value not in writer.schemas):
                    raise ValueError("no function")
                if not named:
                    named = True
                    writer.start(value)
                    writer.arguments("".join(waiting))
        if not named:
            raise ValueError("no name of a function")
    except ValueError:
        if writer.calls == before:
            raise
        return text, False
    writer.arguments("" if given else "{}")
    return start[1:], True
