"""When a sequence ends: EOS, stop ids, stop strings, length. Judged token by token, so also inside a block."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from foretoken.engine.detokenize import Detokenizer


class Stopping(Protocol):
    """Decides after each token whether the sequence is over."""

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        ...

    def push(self, token: int) -> str | None:
        """The finish reason once ``token`` ended the sequence, else None."""
        ...


@dataclass(slots=True)
class Length:
    """Ends after ``room`` tokens, or with one of ``ends``: for whoever has no use for the text."""

    room: int
    ends: Collection[int] = ()

    def push(self, token: int) -> str | None:
        self.room -= 1
        return "stop" if token in self.ends else "length" if self.room == 0 else None


class TextStopping:
    """Stopping by tokens and by text, and the text itself.

    ``stop_reason`` is the stop string or stop id that hit, None for EOS and length, as in vLLM.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        max_tokens: int,
        min_tokens: int = 0,
        eos_ids: Collection[int] = (),
        stop_ids: Collection[int] = (),
        stops: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._max, self._min = max_tokens, min_tokens
        self._eos, self._stop_ids = frozenset(eos_ids), frozenset(stop_ids)
        self._stops, self._include = tuple(stops), include_stop
        self._longest = max(map(len, self._stops), default=0)
        self._count, self._given = 0, 0
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def room(self) -> int:
        return self._max - self._count

    def push(self, token: int) -> str | None:
        self._count += 1
        known, ends = len(self.text), token in self._eos or token in self._stop_ids
        if not ends:
            self.text += self._detokenizer.push(token)
        if ends or self._count >= self._max:
            self.text += self._detokenizer.flush()
        if self._count >= self._min and self._cut(known):
            self.finish_reason = "stop"
        elif ends:
            self.finish_reason, self.stop_reason = "stop", None if token in self._eos else token
        elif self._count >= self._max:
            self.finish_reason = "length"
        return self.finish_reason

    def take(self) -> str:
        """Text not given out yet, without what may still turn out to be a stop string."""
        end = len(self.text) if self.finish_reason else len(self.text) - self._held_back()
        piece, self._given = self.text[self._given : end], max(self._given, end)
        return piece

    def _cut(self, known: int) -> bool:
        """Cuts the text at a stop string that ends after its first ``known`` characters. Returns whether there is one.

        Of several it is the one that begins first, of these the shortest. Each is searched no further back than it can
        begin, so a stop string that was complete before ``min_tokens`` does not count.
        """
        hits = [(at, s) for s in self._stops if (at := self.text.find(s, max(0, known - len(s) + 1))) >= 0]
        if not hits:
            return False
        at, stop = min(hits, key=lambda hit: (hit[0], len(hit[1])))
        self.text, self.stop_reason = self.text[: at + (len(stop) if self._include else 0)], stop
        return True

    def _held_back(self) -> int:
        """Length of the longest ending of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self.text) - self._given), 0, -1):
            tail = self.text[len(self.text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
