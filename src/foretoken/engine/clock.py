"""The clock of decode steps."""

from __future__ import annotations

import time

import torch

from foretoken.core.devices import wait_for
from foretoken.core.step import Timings


class StepClock:
    """Times of the parts of one step after another, in seconds. A part ends when ``device`` has done its work.

    Attributes:
        missed_tokens: See ``Timings``; set during the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._waits = device if device.type == "cuda" else None
        self._times: list[float] = []
        self.missed_tokens = 0

    def start(self) -> None:
        """Begins a step."""
        self._times, self.missed_tokens = [time.perf_counter()], 0

    def lap(self) -> None:
        """Ends a part of the step."""
        if self._waits is not None:
            wait_for(self._waits)
        self._times.append(time.perf_counter())

    def timings(self, batch: int, prompt_rows: int) -> Timings:
        """Ends the last part. Returns the times of all; the arguments are those of ``Timings``."""
        self.lap()
        start, proposed, scored, verified, end = self._times
        return Timings(
            proposed - start,
            scored - proposed,
            verified - scored,
            end - verified,
            batch,
            prompt_rows,
            self.missed_tokens,
        )
