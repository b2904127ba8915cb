"""How much of waiting prompts a round may read, so that those who are being answered hardly notice."""

from __future__ import annotations

from typing import Literal

from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest
from foretoken.core.step import Timings

PromptRows = int | Literal["auto"] | None
"""Rows of prompts in one round: None all there are, a number at most so many, "auto" what a round can bear."""

_ALONE = 512  # rows while nobody is being answered; the next request may come in the middle
_FIRST, _LEAST = 32, 16  # until it is known what a row takes; and always
_STALL = 1.0  # plain rounds by which a round may take longer
_FADE = 0.9


class Pace:
    """Learns from the rounds what they take with and without prompts in them."""

    def __init__(self, wanted: PromptRows = None) -> None:
        if isinstance(wanted, str) and wanted != "auto":
            raise InvalidRequest(f"max_num_batched_tokens must be a number, 'auto' or None, got {wanted!r}")
        if not isinstance(wanted, str):
            integer("max_num_batched_tokens", wanted, 1, optional=True)
        self.wanted = wanted
        self._plain: float | None = None
        self._row: float | None = None

    def rows(self, answering: int) -> int | None:
        """Rows of prompts for a round in which so many sequences are answered; None is no limit."""
        if self.wanted != "auto":
            return self.wanted
        if not answering:
            return _ALONE
        if self._plain is None or self._row is None:
            return _FIRST
        return max(_LEAST, min(_ALONE, int(_STALL * self._plain / max(self._row, 1e-9))))

    def observe(self, timings: Timings) -> None:
        """A round in which somebody was answered."""
        seconds = timings.total
        if not timings.prompt_rows:
            self._plain = seconds if self._plain is None else _FADE * self._plain + (1.0 - _FADE) * seconds
        elif self._plain is not None:
            row = max(0.0, seconds - self._plain) / timings.prompt_rows
            self._row = row if self._row is None else 0.5 * (self._row + row)
