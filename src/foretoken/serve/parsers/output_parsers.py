"""Parsers of an answer: reasoning, function calls, and OpenAI's harmony format."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from foretoken.serve.parsers import OutputEvent, OutputParser, ReasoningDelta, TextDelta
from foretoken.serve.parsers.call_bodies import CallBody, CallWriter, Reading, Schemas
from foretoken.serve.parsers.values import split_at

_BARE_SPACE = " \r\n\t,;[]"
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]+)")


class WithoutTokens(OutputParser):
    """Hands the text to another parser without some special tokens, each of which comes in one piece."""

    def __init__(self, dropped: Sequence[str], parser: OutputParser) -> None:
        super().__init__(parser)
        self._dropped = re.compile("|".join(re.escape(text) for text in sorted(dropped, key=len, reverse=True)))
        self._parser = parser

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[OutputEvent]:
        events = self._parser.push(self._dropped.sub("", text), tokens)
        self.reasoning_tokens = self._parser.reasoning_tokens
        return events

    def finish(self) -> list[OutputEvent]:
        return self._parser.finish()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags of a family."""

    start: str  # chat templates may write it at the end of the prompt
    end: str
    also_ends: tuple[str, ...] = ()  # tags of calls: they end reasoning without ``end``, and belong to the answer


class ReasoningParser(OutputParser):
    """Separates reasoning from the answer, which another parser reads.

    Whitespace around the reasoning, and between it and the answer, is dropped. Reasoning that is not ended remains
    reasoning. Tags later in the answer are content.

    ``opened`` is whether the output begins within the reasoning, ``end_token`` the token of ``format.end`` if it is
    one. The tags count as reasoning. Where the reasoning ends within a piece and ``end_token`` is unknown, the tokens
    of the piece count by the reasoning's share of its characters.
    """

    def __init__(
        self, format: ReasoningFormat, answer: OutputParser, opened: bool, end_token: int | None = None
    ) -> None:
        super().__init__(answer)
        self._format, self._answer, self._end_token = format, answer, end_token
        self._within: bool | None = True if opened else None  # None before the first text, False behind it
        self._held = ""
        self._may_repeat = opened  # whether the output may begin with the start again
        self._began = self._ended = False  # whether reasoning was emitted, and whether the answer follows it

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[OutputEvent]:
        self._held += text
        events: list[OutputEvent] = []
        if self._within is None:
            self._look_for_start()
        if self._within:
            self._read(events)
            self._count(text, tokens)
        if self._within is False:
            events += self._pass_on()
        return events

    def finish(self) -> list[OutputEvent]:
        held, self._held = self._held, ""
        if self._within:
            text = held.rstrip() if self._began else held.strip()
            return [ReasoningDelta(text), *self._answer.finish()] if text else self._answer.finish()
        events = self._answer.push(held) if held and not self._ended else []
        return events + self._answer.finish()

    def _look_for_start(self) -> None:
        start = self._held.lstrip()
        if start.startswith(self._format.start):
            self._within, self._held = True, start[len(self._format.start) :]
        elif not self._format.start.startswith(start):
            self._within = False

    def _read(self, events: list[OutputEvent]) -> None:
        """Emits reasoning, up to its end if that has come."""
        tags = (self._format.end, *self._format.also_ends)
        if not self._began:
            self._held = self._held.lstrip()
        if self._may_repeat:
            if len(self._held) < len(self._format.start) and self._format.start.startswith(self._held):
                return
            self._held, self._may_repeat = self._held.removeprefix(self._format.start).lstrip(), False
        text, tag, rest = split_at(self._held, tags)
        stripped = text.rstrip()
        if stripped:
            events.append(ReasoningDelta(stripped))
            self._began = True
        if tag:
            self._within, self._ended = False, True
            self._held = rest if tag == self._format.end else tag + rest
        else:
            self._held = text[len(stripped) :] + rest

    def _count(self, text: str, tokens: Sequence[int]) -> None:
        """Counts the tokens of a piece that is reasoning, or whose beginning is."""
        if self._within:
            self.reasoning_tokens += len(tokens)
        elif self._end_token is not None and self._end_token in tokens:
            self.reasoning_tokens += list(tokens).index(self._end_token) + 1
        else:
            behind = min(1.0, len(self._held) / len(text)) if text else 0.0
            self.reasoning_tokens += round(len(tokens) * (1.0 - behind))

    def _pass_on(self) -> list[OutputEvent]:
        """Hands the held text to the parser of the answer, without whitespace behind the reasoning."""
        if self._ended:
            self._held = self._held.lstrip()
        if not self._held:
            return []
        held, self._held, self._ended = self._held, "", False
        return self._answer.push(held)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A family's format of function calls.

    ``opens`` has the reader of the text behind each tag that opens a call, ``bare`` the reader of a call without a tag
    for each character with which one may begin the answer.
    """

    opens: Mapping[str, CallBody] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # tags around calls that carry nothing
    bare: Mapping[str, CallBody] = field(default_factory=dict)
    only_calls: bool = False  # whether a grammar allows nothing else; a call that was cut before its name is no content

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.opens, *self.ignored)


class _Position(Enum):
    BEFORE = auto()  # nothing but whitespace and ignored tags, then a call or text
    TEXT = auto()
    AFTER = auto()  # as BEFORE, behind a call


class ToolParser(OutputParser):
    """Reads the answer. Text that may become a call is held back until it is certain.

    A function that the request names (``named``) is called even if the answer was cut before its name.
    """

    def __init__(self, format: CallFormat, schemas: Schemas, named: str | None = None) -> None:
        self._format, self._writer, self._named = format, CallWriter(schemas), named
        super().__init__(self._writer)
        self._held, self._skipped = "", ""
        self._place, self._bare = _Position.BEFORE, bool(format.bare)
        self._body: Reading | None = None
        self._calls_before = 0  # the body
        self._raw = ""  # text of the call, while it may still turn out to be none

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[OutputEvent]:
        self._held += text
        while self._held and self._advance():
            pass
        return self._writer.take()

    def finish(self) -> list[OutputEvent]:
        held, self._held = self._held, ""
        if self._body is not None:
            held = "" if self._in_call else self._raw
            self._body = None
        elif self._place is _Position.AFTER:
            held = "" if not held.strip(self._space) else held
        self._content(self._skipped + held)
        if self._named is not None and not self.calls:
            self._writer.start(self._named)
        return self._writer.take()

    @property
    def _space(self) -> str | None:
        return _BARE_SPACE if self._bare and self._place is _Position.AFTER else None

    @property
    def _in_call(self) -> bool:
        """Whether the body has begun a call."""
        return self._writer.calls > self._calls_before

    def _advance(self) -> bool:
        """Consumes held text. Returns whether more may be consumed."""
        if self._body is not None:
            return self._read_body(self._body)
        return self._read_text() if self._place is _Position.TEXT else self._begin()

    def _read_text(self) -> bool:
        text, tag, rest = split_at(self._held, self._format.tags)
        self._content(text)
        self._held = tag + rest
        if tag:
            self._place, self._bare = _Position.BEFORE, False
        return bool(tag)

    def _begin(self) -> bool:
        """Consumes text where a call may begin."""
        start = self._held.lstrip(self._space)
        space = self._held[: len(self._held) - len(start)]
        if not start:
            return False
        before, tag, rest = split_at(start, self._format.tags)
        if tag and not before:
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
        skipped, self._skipped, self._place = self._skipped, "", _Position.TEXT
        self._content(skipped)
        return True

    def _skip(self, text: str) -> None:
        """Drops ignored text. Before a call it is kept, because it is content if no call follows."""
        if self._place is _Position.BEFORE:
            self._skipped += text

    def _enter(self, body: CallBody, before: str, rest: str) -> None:
        self._body, self._raw, self._skipped, self._held = body(self._writer), before, "", rest
        self._opened, self._calls_before = len(before), self._writer.calls
        next(self._body)  # up to where it takes text

    def _read_body(self, body: Reading) -> bool:
        text, self._held = self._held, ""
        if not self._in_call:
            self._raw += text
        try:
            body.send(text)
        except StopIteration as complete:
            self._body, self._held, self._place = None, complete.value, _Position.AFTER
        except ValueError:  # it is no call
            self._content(self._raw[: self._opened])
            self._body, self._held, self._place = None, self._raw[self._opened :], _Position.TEXT
            if not self._opened:  # bare: its first character is no tag
                self._bare = False
        return self._body is None

    def _content(self, text: str) -> None:
        if text and not self._format.only_calls:
            self._writer.events.append(TextDelta(text))


class HarmonyParser(OutputParser):
    """Reads messages. ``analysis`` is reasoning, a message to a function is a call, and everything else is content.

    The prompt ends with ``<|start|>assistant``, so the output begins within a header. Text that begins with no header
    is content.
    """

    def __init__(self) -> None:
        self._writer = CallWriter({})
        super().__init__(self._writer)
        self._held = ""
        self._header = True
        self._first = True
        self._kind: type[TextDelta | ReasoningDelta] | None = TextDelta  # of the message's text; None for arguments

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[OutputEvent]:
        self._held += text
        reasons = not self._header and self._kind is ReasoningDelta
        while self._held and (self._read_header() if self._header else self._read_message()):
            pass
        events = self._writer.take()
        if reasons or any(isinstance(event, ReasoningDelta) for event in events):
            self.reasoning_tokens += _share(events, tokens)
        return events

    def finish(self) -> list[OutputEvent]:
        held, self._held = self._held, ""
        if not self._header:
            self._write(held)
        return self._writer.take()

    def _read_header(self) -> bool:
        if self._first:
            start = self._held.lstrip()
            if not any(tag.startswith(start[: len(tag)]) for tag in (*HARMONY_TAGS, "to=")):
                self._first = self._header = False
                return True
        header, mark, rest = self._held.partition("<|message|>")
        if not mark:
            return False
        channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
        self._held, self._header, self._first = rest, False, False
        if function is not None:
            self._kind = None
            self._writer.start(function[1])
        else:
            reasons = (channel is not None and channel[1] == "analysis") or "to=" in header
            self._kind = ReasoningDelta if reasons else TextDelta
        return True

    def _read_message(self) -> bool:
        text, tag, rest = split_at(self._held, _ENDS)
        self._write(text)
        self._held = tag + rest if tag == "<|channel|>" else rest
        self._header = bool(tag)
        return self._header

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._kind is None:
            self._writer.arguments(text)
        else:
            self._writer.events.append(self._kind(text))


def _share(events: Sequence[OutputEvent], tokens: Sequence[int]) -> int:
    """Returns the number of a piece's tokens that are reasoning, by the share of its characters."""
    lengths = [len(event.text) for event in events if isinstance(event, TextDelta | ReasoningDelta)]
    reasoning = sum(len(event.text) for event in events if isinstance(event, ReasoningDelta))
    return round(len(tokens) * reasoning / sum(lengths)) if sum(lengths) else len(tokens)
