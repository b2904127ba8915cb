"""What passes of the target take by their rows: one account for all that decide by it, learned from the rounds.

Sizes are compared at one speed of the machine, which is followed apart from them: a slow minute makes no size dearer
than another. Rounds that bring in a prompt teach nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from foretoken.control.curve import Array, Curve
from foretoken.core.step import StepOutput, Timings, is_decode_only

_KNOWN, _FOLLOW = 2.0, 0.3  # observations of a size that tell the machine's speed by it, and how fast it is followed;
_JUMP, _LEAP = 0.15, 0.5  # faster where it differs by more than noise
_DIP = 0.9  # of what fewer rows take: a pass that takes less tells that the machine has become faster
_FARTHEST = 2.0  # times the speed so far: what one round can tell of it
_DISTURBED, _PASSING = 4.0, 3  # times what is expected; so many in a row are no passing disturbance


class Passes:
    """Each that decides may report a round; told of it twice it learns once.

    level: how slow the machine is now, where 1 is how it was at first.
    """

    def __init__(self) -> None:
        self._shape, self.level = Curve(), 1.0  # at level 1
        self._seen: Timings | None = None
        self._odd = 0  # rounds in a row that took far too long

    @property
    def known(self) -> bool:
        """Whether any was seen."""
        return self._shape.weight > 0.0

    def observe(self, steps: Sequence[StepOutput]) -> None:
        """A round, of which what the proposer took is left out."""
        if not steps or steps[0].timings is self._seen or not is_decode_only(steps):
            return
        timings = self._seen = steps[0].timings
        self.add(sum(len(step.draft) + 1 for step in steps), timings.total - timings.propose)

    def add(self, rows: int, seconds: float) -> None:
        """A pass. What sizes that are known take more than usual is the machine's doing."""
        if seconds <= 0.0:  # nobody looked at a clock
            return
        if self._shape.known(rows) >= _KNOWN:
            change = seconds / self.alone(rows)
            self._odd = self._odd + 1 if change > _DISTURBED else 0
            if 0 < self._odd < _PASSING:
                return
            change = math.log(min(_FARTHEST, max(1.0 / _FARTHEST, change)))
            self.level *= math.exp(change * (_FOLLOW if abs(change) < _JUMP else _LEAP))
        elif seconds < _DIP * (fewer := self.level * self._shape.below(rows)):
            self.level *= seconds / fewer
        self._shape.add(rows, seconds / self.level)

    def put(self, seconds: Mapping[int, float]) -> None:
        """By rows what passes took in one moment, instead of what was known of them."""
        for rows, taken in seconds.items():
            self._shape.put(rows, taken / self.level)

    def doubt(self, weight: float) -> None:
        """What is known counts as ``weight`` observations of each size, at most."""
        self._shape.doubt(weight)

    def alone(self, rows: float) -> float:
        """Seconds of a pass over ``rows`` rows, at the speed that the machine has now; 0 until one was seen."""
        return self.level * self._shape.at(rows)

    def over(self, rows: Array) -> Array:
        """``alone`` for each of ``rows``, whole or not."""
        return self.level * self._shape.over(rows)

    def beside(self, rows: Array, of: int, *, at_best: bool = False) -> Array:
        """How many times a pass over ``of`` rows, which are fewer, each of ``rows`` takes; ones until one was seen.

        at_best: if sizes that were never seen take no more than smaller ones did.
        """
        base = self._shape.at(of)
        found = self._shape.least(rows) if at_best else self._shape.over(rows)
        return np.maximum(1.0, found / base) if base else np.ones(len(rows))
