"""OpenAI's harmony format, which gpt-oss writes: messages with a channel and a recipient."""

from __future__ import annotations

import re
from collections.abc import Sequence

from foretoken.serve.output import OutputEvent, ReasoningDelta, TextDelta
from foretoken.serve.parsers.bodies import Writer
from foretoken.serve.parsers.tags import find_tag, split_held

TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]+)")


class HarmonyParser:
    """Reads messages. ``analysis`` is reasoning, a message to a function is a call, and everything else is content.

    The prompt ends with ``<|start|>assistant``, so the output begins within a header. Text that begins with no header
    is content.
    """

    def __init__(self) -> None:
        self._writer = Writer({})
        self.reasoning_tokens = 0
        self._held = ""
        self._header = True
        self._first = True
        self._kind: type[TextDelta] | type[ReasoningDelta] | None = (
            TextDelta  # of the message's text; None for arguments
        )

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
        reasons = not self._header and self._kind is ReasoningDelta
        while self._held and (self._read_header() if self._header else self._read_message()):
            pass
        events = self._writer.take()
        if reasons or any(isinstance(event, ReasoningDelta) for event in events):
            self.reasoning_tokens += _share(events, tokens)
        return events

    def finish(self) -> list[OutputEvent]:
        """See ``OutputParser``."""
        held, self._held = self._held, ""
        if not self._header:
            self._write(held)
        return self._writer.take()

    def _read_header(self) -> bool:
        if self._first:
            start = self._held.lstrip()
            if not any(tag.startswith(start[: len(tag)]) for tag in (*TAGS, "to=")):
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
            self._kind = (
                ReasoningDelta if (channel is not None and channel[1] == "analysis") or "to=" in header else TextDelta
            )
        return True

    def _read_message(self) -> bool:
        place, tag = find_tag(self._held, _ENDS)
        if not tag:
            text, self._held = split_held(self._held, _ENDS)
            self._write(text)
            return False
        self._write(self._held[:place])
        self._held = self._held[place:] if tag == "<|channel|>" else self._held[place + len(tag) :]
        self._header = True
        return True

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._kind is None:
            self._writer.arguments(text)
        else:
            self._writer.events.append(self._kind(text))


def _share(events: Sequence[OutputEvent], tokens: Sequence[int]) -> int:
    """Returns how many of a piece's tokens are reasoning, by the share of its characters."""
    lengths = [len(event.text) for event in events if isinstance(event, TextDelta | ReasoningDelta)]
    reasoning = sum(len(event.text) for event in events if isinstance(event, ReasoningDelta))
    return round(len(tokens) * reasoning / sum(lengths)) if sum(lengths) else len(tokens)
