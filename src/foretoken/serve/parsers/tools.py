"""Separates function calls from the content of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from foretoken.serve.output import OutputEvent, TextDelta
from foretoken.serve.parsers.bodies import CallBody, Schemas, Writer
from foretoken.serve.parsers.tags import find_tag, split_held

_BARE_SPACE = " \r\n\t,;[]"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes function calls.

    Attributes:
        opens: For each tag that opens a call, what reads the text behind it.
        ignored: Tags around calls that carry nothing.
        bare: For each character with which a call without a tag may begin the answer, what reads it.
        only_calls: Whether a grammar allows nothing but calls; a call that was cut before its name is then no content.
    """

    opens: Mapping[str, Callable[[Writer], CallBody]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    bare: Mapping[str, Callable[[Writer], CallBody]] = field(default_factory=dict)
    only_calls: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags."""
        return (*self.opens, *self.ignored)


class _Place(Enum):
    BEFORE = auto()  # nothing but whitespace and ignored tags, then a call or text
    TEXT = auto()
    AFTER = auto()  # as BEFORE, behind a call


class ToolParser:
    """Reads the answer. Text that may become a call is held back until it is certain.

    Args:
        format: How the family writes calls.
        schemas: The functions that exist, with the JSON schema of their arguments.
        named: The function that the request names; it is called even if the answer was cut before its name.
    """

    reasoning_tokens = 0

    def __init__(self, format: CallFormat, schemas: Schemas, named: str | None = None) -> None:
        self._format, self._writer, self._named = format, Writer(schemas), named
        self._held, self._skipped = "", ""
        self._place, self._bare = _Place.BEFORE, bool(format.bare)
        self._body: CallBody | None = None
        self._raw = ""  # text of the call, while it may still turn out to be none

    @property
    def calls(self) -> int:
        """See ``OutputParser``."""
        return self._writer.calls

    @property
    def cut(self) -> bool:
        """See ``OutputParser``."""
        return self._writer.cut

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[OutputEvent]:
        """See ``OutputParser``."""
        self._held += text
        while self._held and self._advance():
            pass
        return self._writer.take()

    def finish(self) -> list[OutputEvent]:
        """See ``OutputParser``."""
        held, self._held = self._held, ""
        if self._body is not None:
            held = "" if self._body.started else self._raw
            self._body = None
        elif self._place is _Place.AFTER:
            held = "" if not held.strip(self._space) else held
        self._content(self._skipped + held)
        if self._named is not None and not self.calls:
            self._writer.start(self._named)
        return self._writer.take()

    @property
    def _space(self) -> str | None:
        return _BARE_SPACE if self._bare and self._place is _Place.AFTER else None

    def _advance(self) -> bool:
        """Consumes held text. Returns whether more may be consumed."""
        if self._body is not None:
            return self._read_body(self._body)
        return self._read_text() if self._place is _Place.TEXT else self._begin()

    def _read_text(self) -> bool:
        tags = self._format.tags
        place, tag = find_tag(self._held, tags)
        if not tag:
            text, self._held = split_held(self._held, tags)
            self._content(text)
            return False
        self._content(self._held[:place])
        self._held, self._place, self._bare = self._held[place:], _Place.BEFORE, False
        return True

    def _begin(self) -> bool:
        """Consumes text where a call may begin."""
        start = self._held.lstrip(self._space)
        space = self._held[: len(self._held) - len(start)]
        if not start:
            return False
        _, tag = find_tag(start[: max(map(len, self._format.tags), default=0)], self._format.tags)
        if tag and start.startswith(tag):
            rest = start[len(tag) :]
            if tag in self._format.opens:
                self._enter(self._format.opens[tag], self._skipped + space + tag, rest)
                self._bare = False
            else:
                self._skip(space + tag)
                self._held = rest
            return True
        if self._bare and start[0] in self._format.bare:
            self._enter(self._format.bare[start[0]], self._skipped + space, start)
            return True
        if any(tag.startswith(start) for tag in self._format.tags):
            return False
        skipped, self._skipped, self._place = self._skipped, "", _Place.TEXT
        self._content(skipped)
        return True

    def _skip(self, text: str) -> None:
        """Drops ignored text. Before a call it is kept, because it is content if no call follows."""
        if self._place is _Place.BEFORE:
            self._skipped += text

    def _enter(self, body: Callable[[Writer], CallBody], before: str, rest: str) -> None:
        self._body, self._raw, self._skipped, self._held = body(self._writer), before, "", rest
        self._opened = len(before)

    def _read_body(self, body: CallBody) -> bool:
        text, self._held = self._held, ""
        if not body.started:
            self._raw += text
        try:
            rest = body.push(text)
        except ValueError:  # it is no call
            self._content(self._raw[: self._opened])
            self._body, self._held, self._place = None, self._raw[self._opened :], _Place.TEXT
            if not self._opened:  # bare: its first character is no tag
                self._bare = False
            return True
        if rest is None:
            return False
        self._body, self._held, self._place = None, rest, _Place.AFTER
        return True

    def _content(self, text: str) -> None:
        if text and not self._format.only_calls:
            self._writer.events.append(TextDelta(text))
