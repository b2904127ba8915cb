"""Parsers of an answer: reasoning, function calls, and OpenAI's harmony format."""

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.serve.parsers import OutputEvent, OutputParser, ReasoningDelta, TextDelta
from foretoken.serve.parsers.call_bodies import CallBody, CallWriter, Schemas
from foretoken.serve.parsers.values import split_at

_BARE_SPACE = " \r\n\t,;[]"
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]+)")

Held = Generator[str, str, Any]
"""Reads text that is sent to it. Yields the text that is held back, which is content if the output ends there."""


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


class ToolParser(OutputParser):
    """Reads the answer. Text that may become a call is held back until it is certain.

    A function that the request names (``named``) is called even if the answer was cut before its name.
    """

    def __init__(self, format: CallFormat, schemas: Schemas, named: str | None = None) -> None:
        self._format, self._writer, self._named = format, CallWriter(schemas), named
        super().__init__(self._writer)
        self._reading = self._read()
        self._held = next(self._reading)  # content if the output ends here

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[OutputEvent]:
        self._held = self._reading.send(text)
        return self._writer.take()

    def finish(self) -> list[OutputEvent]:
        self._content(self._held)
        if self._named is not None and not self.calls:
            self._writer.start(self._named)
        return self._writer.take()

    def _read(self) -> Held:
        """Reads ignored tags and calls, and text between them."""
        opens, bare, tags = self._format.opens, self._format.bare, self._format.tags
        after, held, ignored = False, "", ""  # ignored: tags before the first call, content if no call follows
        while True:
            start = held.lstrip(_BARE_SPACE if bare and after else None)
            space = held[: len(held) - len(start)]
            before, tag, rest = split_at(start, tags)
            if before or not tag:
                tag, rest = "", start
            body = opens.get(tag) if tag else bare.get(start[:1])
            if body is not None:
                bare = {} if tag else bare
                held, after = yield from self._read_call(body, ignored + space + tag, rest)
                ignored = ""
            elif tag:
                held, ignored = rest, ignored if after else ignored + space + tag
                continue
            elif not start or any(tag.startswith(start) for tag in tags):
                held += yield ignored + ("" if after and not start else held)
                continue
            else:
                self._content(ignored)
                ignored, after = "", False
            if not after:
                held = yield from self._read_text(held)
                bare = {}

    def _read_call(self, body: CallBody, opening: str, text: str) -> Generator[str, str, tuple[str, bool]]:
        """Returns the text behind the call, and True; if the text is no call, the text, and False."""
        before, raw, reading = self._writer.calls, opening, body(self._writer)
        next(reading)  # up to where it takes text
        try:
            while True:
                if self._writer.calls == before:
                    raw += text
                reading.send(text)
                text = yield raw if self._writer.calls == before else ""
        except StopIteration as complete:
            return complete.value, True
        except ValueError:
            self._content(opening)
            return raw[len(opening) :], False

    def _read_text(self, held: str) -> Held:
        """Reads content up to a tag. Returns the text from the tag on."""
        while True:
            text, tag, rest = split_at(held, self._format.tags)
            self._content(text)
            if tag:
                return tag + rest
            held = rest + (yield rest)

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
        self._header = self._first = True
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
