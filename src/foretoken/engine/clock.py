"""The clock of a decode step."""

from __future__ import annotations

import time

import torch

from foretoken.core.devices import wait_for
from foretoken.core.step import Timings


class StepClock:
    """Times of the parts of one step, in seconds. A part ends when ``device`` has done its work."""

    def __init__(self, device: torch.device, batch: int, prompt_rows: int) -> None:
        self._waits = device if device.type == "cuda" else None
        self.batch, self.prompt_rows, self.missed_tokens = batch, prompt_rows, 0
        self.laps: list[float] = []
        self._last = time.perf_counter()

    def lap(self) -> None:
        """Ends a part of the step."""
        if self._waits is not None:
            wait_for(self._waits)
        now = time.perf_counter()
        self.laps.append(now - self._last)
        self._last = now

    def timings(self) -> Timings:
        """Ends the last part. Returns the times of all."""
        self.lap()
        propose, score, verify, commit = self.laps
        return Timings(propose, score, verify, commit, self.batch, self.prompt_rows, self.missed_tokens)
