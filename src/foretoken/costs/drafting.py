"""Seconds of drafting by depth and number of requests, and of catching up on missed tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from foretoken.core.step import Timings
from foretoken.costs.curve import Array, Curve
from foretoken.costs.tuning import TUNING, Tuning

Curves = dict[int, Curve]  # by the bit length of the number of requests


class DraftingTimes:
    """Seconds of drafting, learned from steps.

    A proposer that did not draft for a request first processes the tokens that it missed; these seconds are kept apart
    from drafting. So are those of steps in which no model was asked, only what drafts for free.
    """

    def __init__(self, tuning: Tuning = TUNING) -> None:
        self._tuning = tuning
        self._model: Curves = {}  # of steps in which a model drafted, over the depth
        self._free: Curves = {}  # of the others
        self._missed = (0.0, 0.0)  # seconds of catching up, tokens
        self._delayed = 0  # steps in a row in which catching up took unusually long
        self._confirmed = False  # drafting was timed since the warm-up
        self._doubted = False  # it seems faster than it was in the warm-up

    @property
    def known(self) -> bool:
        """Whether drafting with a model was timed."""
        return bool(self._model)

    def observe(self, depth: int, count: int, timings: Timings, *, free: bool = False) -> None:
        """Learns from the drafts of a step.

        Args:
            depth: Passes of the model, or draft tokens of what drafts for free.
            count: Number of requests that drafted.
            timings: Times of the step, and the tokens that the proposer had missed.
            free: No model was asked.
        """
        if timings.missed_tokens > self._tuning.slack:
            self._catch_up(depth, count, timings)
            return
        if not free:
            expected = self.seconds(depth, count)
            if self._doubted and expected:  # one time shows how wrong the others are
                self.scale(timings.propose / expected)
            self._confirmed, self._doubted = True, False
        self._curve(free, count).add(depth, timings.propose)

    def calibrate(self, drafting: Mapping[int, float], missed: float = math.inf) -> None:
        """Replaces what was learned in the warm-up by its medians. See ``CostModel.calibrate``."""
        for depth, seconds in drafting.items():
            self._curve(False, 1).put(depth, seconds)
        seconds, tokens = self._missed
        self._missed = min(seconds, missed * tokens) if tokens else 0.0, tokens

    def discount(self) -> None:
        """Lets everything learned so far count little beside what follows."""
        for curve in (*self._model.values(), *self._free.values()):
            curve.discount(self._tuning.calibrated)
        seconds, tokens = self._missed
        scale = max(1.0, tokens / 64.0)
        self._missed = seconds / scale, tokens / scale
        self._confirmed = False

    def refuse(self) -> None:
        """Lets drafting seem a little faster, after it was refused because of the seconds that it took in the warm-up.

        While nothing is drafted nothing is timed, and what other programs delayed then would be believed for ever.
        """
        if not self._confirmed:
            self._doubted = True
            self.scale(self._tuning.refused)

    def scale(self, factor: float) -> None:
        """Multiplies the seconds of drafting with a model, and of catching up, by ``factor``."""
        for curve in self._model.values():
            curve.scale(factor)
        seconds, tokens = self._missed
        self._missed = factor * seconds, tokens

    def seconds(self, depth: int, count: int, *, free: bool = False) -> float:
        """Returns the seconds of drafting ``depth`` tokens for each of ``count`` requests, 0 if none was timed.

        Args:
            depth: Draft tokens of each request.
            count: Number of requests that draft.
            free: No model is asked.
        """
        curves = self._curves(free)
        return _nearest(curves, count.bit_length()).at(depth) if curves else 0.0

    def table(self, depths: Array, counts: Array, *, free: bool = False) -> Array:
        """Returns ``seconds`` for each pair of ``depths`` [N] and ``counts`` [N]."""
        table, curves = np.zeros(len(depths)), self._curves(free)
        bits = np.frexp(counts)[1]  # bit lengths
        for length in range(int(bits.min()), int(bits.max()) + 1) if curves else ():
            table[bits == length] = _nearest(curves, length).over(depths[bits == length])
        return table

    def missed(self, tokens: float) -> float:
        """Returns the seconds in which a proposer processes ``tokens`` tokens that it missed."""
        seconds, count = self._missed
        return tokens * seconds / count if count else 0.0

    def describe(self, seconds: Callable[[Curve], dict[str, float]]) -> dict[str, object]:
        """Returns what was learned, as in ``CostModel.describe``, each curve by ``seconds``."""

        def by_count(curves: Curves) -> dict[str, dict[str, float]]:
            return {str(1 << bits - 1): seconds(curve) for bits, curve in sorted(curves.items())}

        return {
            "draft_seconds": by_count(self._model),
            "free_draft_seconds": by_count(self._free),
            "missed_token_seconds": self.missed(1),
        }

    def _catch_up(self, depth: int, count: int, timings: Timings) -> None:
        """Learns from a step whose missed tokens took a part of the time."""
        missed, seconds, tuning = timings.missed_tokens, timings.propose, self._tuning
        if self._model:
            catching_up, usual = max(0.0, seconds - self.seconds(depth, count)), self.missed(missed)
            self._delayed = self._delayed + 1 if usual and catching_up > tuning.disturbed * usual else 0
            if 0 < self._delayed < tuning.passing:
                return
        else:
            step = seconds / (depth + missed / tuning.missed_per_step)
            self._curve(False, count).add(depth, step * depth)
            catching_up = seconds - step * depth
        self._missed = 0.8 * self._missed[0] + catching_up, 0.8 * self._missed[1] + missed

    def _curves(self, free: bool) -> Curves:
        return self._free if free else self._model

    def _curve(self, free: bool, count: int) -> Curve:
        """Returns the curve of a number of requests, which is made if there is none."""
        return self._curves(free).setdefault(count.bit_length(), Curve(origin=True, tuning=self._tuning))


def _nearest(curves: Curves, bits: int) -> Curve:
    """Returns the curve of the nearest number of requests."""
    return curves.get(bits) or curves[min(curves, key=lambda known: abs(known - bits))]
