"""Seconds of drafting by depth and number of requests, and of processing missed tokens."""

import math
from collections.abc import Callable, Mapping

from foretoken.costs.curve import Curve
from foretoken.costs.tuning import TUNING, Tuning

Curves = dict[int, Curve]  # by the bit length of the number of requests


class DraftingTimes:
    """Seconds of drafting, learned from steps.

    A proposer that did not draft for a request first processes the tokens that it missed; these seconds are kept apart
    from drafting. Steps in which no model drafted teach nothing.
    """

    def __init__(self, tuning: Tuning = TUNING) -> None:
        self._tuning = tuning
        self._curves: Curves = {}  # over the depth
        self._missed = (0.0, 0.0)  # seconds of processing missed tokens, number of tokens
        self._unconfirmed = False  # drafting was not timed since the warm-up
        self._delayed = 0  # steps in a row in which missed tokens took unusually long

    @property
    def known(self) -> bool:
        """Whether drafting with a model was timed."""
        return bool(self._curves)

    def observe(self, depth: int, count: int, seconds: float, missed: int = 0) -> None:
        """Learns from the drafts of a step.

        Args:
            depth: Passes of the model.
            count: Number of requests for which it drafted.
            seconds: Seconds that they took.
            missed: Number of tokens that the model had not processed before.
        """
        expected = self.seconds(depth, count)
        if self._unconfirmed and seconds < 0.5 * expected:  # other programs delayed the warm-up
            for curve in self._curves.values():
                curve.scale(seconds / expected)
        self._unconfirmed = False
        if missed > self._tuning.wait_steps:
            self._catch_up(depth, count, seconds, missed)
            return
        self._curve(count).add(depth, seconds)

    def calibrate(self, drafting: Mapping[int, float], missed: float = math.inf) -> None:
        """Replaces what was learned in the warm-up by its medians. See ``CostModel.calibrate``."""
        for depth, seconds in drafting.items():
            self._curve(1).put(depth, seconds)
        seconds, tokens = self._missed
        self._missed = min(seconds, missed * tokens) if tokens else 0.0, tokens

    def discount(self) -> None:
        """Lets everything learned so far count little beside what follows."""
        for curve in self._curves.values():
            curve.discount(self._tuning.weak_steps)
        self._unconfirmed = True
        seconds, tokens = self._missed
        scale = max(1.0, tokens / 64.0)
        self._missed = seconds / scale, tokens / scale

    def seconds(self, depth: int, count: int) -> float:
        """Returns the seconds of drafting ``depth`` tokens for each of ``count`` requests, 0 if none was timed.

        Args:
            depth: Draft tokens of each request.
            count: Number of requests that draft.
        """
        return _nearest(self._curves, count.bit_length()).at(depth) if self._curves else 0.0

    def between(self, depth: float, count: int) -> float:
        """Returns ``seconds``, where those of a depth are no less than those of smaller ones."""
        return _nearest(self._curves, count.bit_length()).between(depth) if self._curves else 0.0

    def missed(self, tokens: float) -> float:
        """Returns the seconds in which a proposer processes ``tokens`` tokens that it missed."""
        seconds, count = self._missed
        return tokens * seconds / count if count else 0.0

    def describe(self, seconds: Callable[[Curve], dict[str, float]]) -> dict[str, object]:
        """Returns the measured seconds, as in ``CostModel.describe``, each curve by ``seconds``."""
        curves = {str(1 << bits - 1): seconds(curve) for bits, curve in sorted(self._curves.items())}
        return {"draft_seconds": curves, "missed_token_seconds": self.missed(1)}

    def _catch_up(self, depth: int, count: int, seconds: float, missed: int) -> None:
        """Learns from a step whose missed tokens took a part of the time."""
        tuning = self._tuning
        if self._curves:
            catching_up, usual = max(0.0, seconds - self.seconds(depth, count)), self.missed(missed)
            self._delayed = self._delayed + 1 if usual and catching_up > tuning.outlier_ratio * usual else 0
            if 0 < self._delayed <= tuning.trusted_steps:
                return
        else:
            step = seconds / (depth + missed / (2 * tuning.wait_steps))
            self._curve(count).add(depth, step * depth)
            catching_up = seconds - step * depth
        self._missed = 0.8 * self._missed[0] + catching_up, 0.8 * self._missed[1] + missed

    def _curve(self, count: int) -> Curve:
        """Returns the curve of a number of requests, which is made if there is none."""
        return self._curves.setdefault(count.bit_length(), Curve(origin=True, tuning=self._tuning))


def _nearest(curves: Curves, bits: int) -> Curve:
    """Returns the curve of the nearest number of requests."""
    return curves.get(bits) or curves[min(curves, key=lambda known: abs(known - bits))]
