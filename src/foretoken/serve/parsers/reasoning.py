"""Reasoning between tags, as in ``<think>...</think>``, before the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.serve.output import OutputEvent, OutputParser, ReasoningDelta
from foretoken.serve.parsers.tags import find_tag, split_held


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags of a family.

    Attributes:
        start: Begins the reasoning. Chat templates may write it at the end of the prompt.
        end: Ends the reasoning.
        also_ends: Tags that end the reasoning where ``end`` is missing, and belong to what follows: those of calls.
    """

    start: str
    end: str
    also_ends: tuple[str, ...] = ()

    def opened_by(self, prompt: str) -> bool:
        """Returns whether the text of the prompt ends within reasoning, so that the output begins there."""
        return prompt.rfind(self.start) > prompt.rfind(self.end) and prompt.rstrip().endswith(self.start)


class ReasoningParser:
    """Separates reasoning from the answer, which another parser reads.

    Whitespace around the reasoning, and between it and the answer, is dropped. Reasoning that is not ended remains
    reasoning. Tags later in the answer are content.

    Args:
        format: The family's tags.
        answer: Parses what follows.
        opened: Whether the output begins within the reasoning.
        end_token: The token that ``format.end`` is, if it is one. It tells which tokens are reasoning.

    Attributes:
        reasoning_tokens: Number of tokens of the reasoning so far, tags included. Where the reasoning ends within a
            piece and ``end_token`` is unknown, those of the piece count by their share of its characters.
    """

    def __init__(
        self, format: ReasoningFormat, answer: OutputParser, opened: bool, end_token: int | None = None
    ) -> None:
        self._format, self._answer, self._end_token = format, answer, end_token
        self.reasoning_tokens = 0
        self._within: bool | None = True if opened else None  # None before the first text, False behind it
        self._held = ""
        self._may_repeat = opened  # whether the output may begin with the start again
        self._began = self._ended = False  # whether reasoning was emitted, and whether the answer follows it

    @property
    def calls(self) -> int:
        """See ``OutputParser``."""
        return self._answer.calls

    @property
    def cut(self) -> bool:
        """See ``OutputParser``."""
        return self._answer.cut

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[OutputEvent]:
        """See ``OutputParser``."""
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
        """See ``OutputParser``."""
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
        place, tag = find_tag(self._held, tags)
        text, held = (self._held[:place], self._held[place:]) if tag else split_held(self._held, tags)
        stripped = text.rstrip()
        if stripped:
            events.append(ReasoningDelta(stripped))
            self._began = True
        if tag:
            self._within, self._ended = False, True
            self._held = held.removeprefix(self._format.end)
        else:
            self._held = text[len(stripped) :] + held

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
