"""The clock of decode steps."""

import torch

from foretoken.core.devices import TimeMark
from foretoken.core.step import Timings

# Marks of a step: its begin, the ends of draft, pass and choice of tokens, then the begin of reading these, and the
# ends of verification and commit. Between choice and reading the host may do other work, whose time does not count.
MARKS = 7


class StepClock:
    """Times of the parts of one step after another, in seconds. A part ends when ``device`` has done its work.

    The clock waits for nothing: when a step's times are read, the host has read its tokens, so that the device has
    reached all marks but perhaps the last one, behind which there is only the copying of cache rows.
    missed_tokens: See ``Timings``; set during the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._marks = [TimeMark(device) for _ in range(MARKS)]
        self._next = self.missed_tokens = 0

    def start(self) -> None:
        """Begins a step."""
        self._next = self.missed_tokens = 0
        self.lap()

    def lap(self) -> None:
        """Ends a part of the step."""
        self._marks[self._next].set()
        self._next += 1

    def timings(self, batch: int, prompt_rows: int) -> Timings:
        """Ends the last part. Returns the times of all; the arguments are those of ``Timings``."""
        self.lap()
        begin, drafted, scored, chosen, resumed, verified, committed = self._marks
        verify = chosen.since(scored) + verified.since(resumed)
        parts = drafted.since(begin), scored.since(drafted), verify, committed.since(verified)
        return Timings(*parts, batch, prompt_rows, self.missed_tokens)
