"""Shortens drafts while memory is short, before an allocation fails, and lets them grow again afterwards."""

import time
from collections.abc import Callable

from foretoken.core.devices import Memory

_RECOVERY = 20  # readings with memory to spare before drafts grow again


class MemoryWatch:
    """Halves draft lengths while memory is short.

    It also applies to requests that ask for a draft length: they ask for speed, and this keeps them from failing.

    Args:
        max_tokens: Largest draft length, which says how many halvings leave nothing.
        read: Returns the free memory; None if it cannot be known, and nothing is limited.
        clock: Returns seconds.

    Attributes:
        halvings: How often draft lengths are halved at present.
    """

    def __init__(
        self, max_tokens: int, read: Callable[[], Memory | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._read, self._clock = max(1, max_tokens.bit_length()), read, clock
        self.halvings = 0
        self._next, self._spare = 0.0, 0

    def cap(self, length: int) -> int:
        """Returns the part of a draft length that memory allows."""
        return 0 if self.halvings >= self._most else length >> self.halvings

    def look(self) -> int:
        """Reads the free memory if that is due. Returns ``halvings``."""
        now = self._clock()
        if now < self._next:
            return self.halvings
        memory = self._read()
        spare, self._spare = self._spare, 0
        if memory is None:
            self.halvings = 0
        elif memory.free < memory.low:
            none = memory.free < memory.low / 2
            self.halvings = self._most if none else min(self._most, self.halvings + 1)
        elif self.halvings and memory.free > 2 * memory.low:
            self._spare = spare + 1
            if self._spare >= _RECOVERY:
                self._spare = 0
                self.halvings -= 1
        plenty = memory is None or memory.free > 4 * memory.low  # which cannot be used up within a second
        self._next = now + (0.05 if self.halvings else 1.0 if plenty else 0.25)
        return self.halvings
