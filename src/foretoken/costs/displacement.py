"""Slowdown of passes because the drafting before them displaced the target's weights from caches."""

from foretoken.costs.tuning import Tuning


class Displacement:
    """Learns the slowdown from the first passes after a settled step, while the speed of the machine is known.

    The caches fill again within ``settle_steps``: the excess falls about quadratically.

    Attributes:
        since: Steps since a model drafted, or prefill displaced the weights.
        passes: Passes behind drafting since a settled step was timed.
        level: Speed of the machine at that step, see ``CostModel.level``.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._ratio, self._weight = 1.0, float(tuning.wait_steps)
        self.since, self.passes, self.level = tuning.settle_steps, 0, 1.0

    @property
    def settled(self) -> bool:
        """Whether the caches were full during the last step."""
        return self.since >= self._tuning.settle_steps

    @property
    def factor(self) -> float:
        """Seconds of the last step's pass, relative to a settled one."""
        left = 1.0 - min(1.0, self.since / self._tuning.settle_steps)
        return 1.0 + max(0.0, self._ratio - 1.0) * left * left

    @property
    def certainty(self) -> float:
        """Share of the passes that make the ratio known."""
        return min(1.0, self._weight / (4 * self._tuning.wait_steps))

    @property
    def tail(self) -> float:
        """Plain steps by which those that follow drafting take longer, all together."""
        return max(0.0, self._ratio - 1.0) * self._tuning.settle_steps / 3

    def count(self, drafted: bool, prefilled: bool) -> None:
        """Counts a step, before anything else is learned from it: whether a model drafted, whether it had prefill."""
        self.since = 0 if drafted else 1 if prefilled else self.since + 1

    def settle(self, level: float) -> None:
        """Notes that a settled step was timed."""
        self.passes, self.level = 0, level

    def learn(self, ratio: float) -> None:
        """Receives the seconds of a pass behind drafting, relative to a settled one of its size at ``level``."""
        self.passes += 1
        if self.passes <= self._tuning.wait_steps:
            self._weight = min(self._weight + 1, self._tuning.memory_steps)
            self._ratio += (max(0.5, min(ratio, 2.0)) - self._ratio) / self._weight

    def calibrate(self, ratio: float, level: float) -> None:
        """Replaces what was learned in the warm-up by the ratio of its medians."""
        self.settle(level)
        self._ratio, self._weight = ratio, 4.0 * self._tuning.wait_steps
