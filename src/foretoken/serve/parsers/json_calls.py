"""Function calls as JSON objects with a name and arguments: Hermes, Qwen, Llama 3, Granite, older Mistral."""

from __future__ import annotations

import json
import re

from foretoken.serve.parsers.bodies import Writer
from foretoken.serve.parsers.values import ValueEnd, is_unicode

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*(?=\S)', re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[^\s,}]+(?=[\s,}])")


class JsonBody:
    """One call, or a list of calls in brackets. Arguments are passed on while they are generated.

    Args:
        writer: Takes the calls.
        strict: Whether only functions that exist and the keys of a call are accepted, because other JSON may stand
            here as well.
    """

    def __init__(self, writer: Writer, strict: bool = False) -> None:
        self._writer, self._strict = writer, strict
        self._held = ""
        self._call: _Call | None = None
        self._listed = False
        self.started = False

    def push(self, text: str) -> str | None:
        """See ``CallBody``."""
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

    def _read(self, call: _Call) -> str | None:
        """Returns the text behind the object, or from where it is malformed. None where it is not complete."""
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

    def __init__(self, writer: Writer, strict: bool) -> None:
        self._writer, self._strict = writer, strict
        self.unread = ""
        self._key: str | None = None  # the key whose value follows
        self._end: ValueEnd | None = None  # within an object or a list
        self._waiting: list[str] | None = []  # arguments before the name, None behind it
        self._given = False
        self.name: str | None = None

    def push(self, text: str) -> str | None:
        """Returns the text behind the object, None where it is not complete. Raises ValueError."""
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
