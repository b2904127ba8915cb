"""Shortens drafts while memory is short, before an allocation fails, and lets them grow again afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable

from foretoken.core.free_memory import Memory
from foretoken.costs.tuning import TUNING, Tuning


class MemoryWatch:
    """Halves draft lengths while memory is short.

    It also applies to requests that ask for a draft length: they ask for speed, and this keeps them from failing.

    Args:
        max_tokens: Largest draft length, which says how many halvings leave nothing.
        read: Returns the free memory; None if it cannot be known, and nothing is limited.
        clock: Returns seconds.
        tuning: Constants.

    Attributes:
        halvings: How often draft lengths are halved at present.
    """

    def __init__(
        self,
        max_tokens: int,
        read: Callable[[], Memory | None],
        clock: Callable[[], float] = time.monotonic,
        tuning: Tuning = TUNING,
    ) -> None:
        self._max_tokens, self._read, self._clock, self._tuning = max_tokens, read, clock, tuning
        self.halvings = 0
        self._next, self._spare = 0.0, 0

    def cap(self, length: int) -> int:
        """Returns the part of a draft length that memory allows."""
        return 0 if self.halvings >= self._tuning.max_halvings else length >> self.halvings

    def look(self) -> int:
        """Reads the free memory if that is due. Returns ``halvings``."""
        now, tuning = self._clock(), self._tuning
        if now < self._next:
            return self.halvings
        memory = self._read()
        spare, self._spare = self._spare, 0
        if memory is None:
            self.halvings = 0
        elif memory.free < memory.low:
            none = memory.free < memory.low / 2
            self.halvings = tuning.max_halvings if none else min(tuning.max_halvings, self.halvings + 1)
        elif self.halvings and memory.free > 2 * memory.low:
            self._spare = spare + 1
            if self._spare >= tuning.recovery:
                self._spare = 0
                self.halvings = min(self.halvings, max(1, self._max_tokens.bit_length())) - 1
        plenty = memory is None or memory.free > tuning.plenty * memory.low
        self._next = now + (tuning.look_short if self.halvings else tuning.look_plenty if plenty else tuning.look)
        return self.halvings
