"""Seconds that a pass takes longer because the drafting before it displaced the target's weights from caches."""

from foretoken.costs.tuning import Tuning


class Displacement:
    """Learns these seconds by comparing the first plain step after drafting with a later one of the same run.

    Steps between these two are not learned from, because the caches fill again. Both are near in time, so the machine
    mostly has the same speed, and where it has not, the error has no preferred sign.

    Attributes:
        since: Steps since a model drafted, or prefill displaced the weights.
        filling: Whether the caches were filling during the last step.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.since, self.filling, self._skipped = tuning.settle_steps, False, 0
        self._seconds, self._comparisons = 0.0, 0
        self._first = (0, 0.0)  # the last first step that was not compared yet: requests, seconds
        self._waited = self._run = 0  # steps with drafts and behind them since a comparison; those of the next one

    def count(self, drafted: bool, prefilled: bool, rare: float) -> None:
        """Counts a step, before anything else is learned from it.

        Args:
            drafted: Whether a model drafted in it.
            prefilled: Whether it had prefill.
            rare: Number of steps in which a plain one costs as much as it may.
        """
        self.since = 0 if drafted else 1 if prefilled else self.since + 1
        if prefilled:
            self._first = 0, 0.0
        settled = not 1 < self.since < self._tuning.settle_steps
        self._skipped = 0 if settled or self._skipped == self._tuning.settle_steps else self._skipped + 1
        self.filling = self._skipped > 0  # not for ever, where others' prefill follows prefill
        self._waited += bool(drafted or self._waited)
        self._run = self._run + 1 if self.due(rare) else 0
        if self._tuning.settle_steps in (self._run, self.since):
            self._waited = self._run = 0

    def due(self, rare: float) -> bool:
        """Returns whether plain steps have to follow each other, of which two can be compared; see ``count``."""
        steps = self._tuning.settle_steps
        return self._waited >= steps * self._tuning.refresh_steps + (steps if self._comparisons else 1) * rare

    def of(self, seconds: float) -> float:
        """Returns the part of the last step's ``seconds`` that displaced caches caused."""
        longest = (1.0 - 1.0 / self._tuning.clip_ratio) * seconds
        return max(0.0, min(self._seconds, longest)) if self.since < 2 else 0.0

    def compare(self, batch: int, seconds: float) -> None:
        """Receives the seconds of a plain step of ``batch`` requests, unless the caches were filling."""
        ratio = self._tuning.clip_ratio
        if self.since == 1:
            self._first = batch, seconds
        elif self._first[0] == batch:
            longer = min(max(self._first[1] / seconds, 1.0 / ratio), ratio) - 1.0
            self._comparisons = min(self._comparisons + 1, self._tuning.wait_steps)
            self._seconds += (longer * seconds - self._seconds) / (self._comparisons + 1)
            self._first = 0, 0.0
