"""The cost model: seconds of plain steps, forward passes and drafting, learned from the steps of an engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from foretoken.core.part import DraftPart
from foretoken.core.step import StepOutput, Timings, is_decode_only
from foretoken.costs.curve import Array, Curve
from foretoken.costs.tuning import TUNING, Tuning

Curves = dict[int, Curve]  # by the bit length of the number of requests


class CostModel:
    """Seconds of passes by rows, of plain steps by batch, of drafting by depth and batch, and of catching up.

    The engine passes every step to ``observe`` once. Controllers and proposers only read.

    Passes of different sizes are compared at one speed of the machine, and ``level`` follows that speed: a slow minute
    makes no size more expensive than another. Steps with prefill teach nothing about passes. A proposer that did not
    draft for a request first processes the tokens that it missed; these seconds are kept apart from drafting. So are
    those of steps in which no model was asked, only what drafts for free.

    Attributes:
        level: Seconds of a pass relative to those of the first observed passes.
    """

    def __init__(self, tuning: Tuning = TUNING) -> None:
        self.tuning, self.level = tuning, 1.0
        self._passes, self._plain = Curve(tuning=tuning), Curve(tuning=tuning)  # at level 1, by rows and by batch
        # Over the depth, by the bit length of the number of requests: with a model, and what drafts for free alone.
        self._drafting: Curves = {}
        self._free_drafting: Curves = {}
        self._missed = (0.0, 0.0)  # seconds of catching up, tokens
        self._disturbed, self._delayed = 0, 0  # disturbed passes in a row, and steps that caught up
        # Whether drafting was timed since the warm-up, and whether it seems faster than it was then.
        self._confirmed = self._doubted = False
        self._since_plain = 0  # steps since a plain one was timed
        self._speedup = 1.0  # moving average over the steps with drafts

    @property
    def known(self) -> bool:
        """Whether any pass was timed."""
        return self._passes.weight > 0.0

    @property
    def ready(self) -> bool:
        """Whether drafting was timed."""
        return bool(self._drafting)

    def observe(self, steps: Sequence[StepOutput]) -> None:
        """Learns from the outputs of one step."""
        if not steps:
            return
        timings, drafting = steps[0].timings, [step for step in steps if step.budget > 0]
        if decode_only := is_decode_only(steps):
            rows = len(steps) + sum(len(step.draft) for step in steps)
            self.observe_pass(rows, timings.total - timings.propose)
            self._since_plain += 1
            if rows == len(steps) and not drafting:
                if self._since_plain >= self.tuning.refresh:
                    self._plain.discount(self.tuning.stale)
                self._plain.add(rows, timings.total / self.level)
                self._since_plain = 0
        free = all(step.part is DraftPart.FREE for step in drafting)
        drafted = any(len(step.draft) for step in steps)
        levels = [step.draft.levels for step in drafting]
        # A search that found nothing took its time, and so did a chain that ended at once; another model was not ready.
        if drafting and (drafted or free or any(levels)):
            depth = max(level or step.budget for level, step in zip(levels, drafting, strict=True))
            self._observe_drafting(depth, len(drafting), timings, free)
        if drafting and drafted:
            plain = self.plain_seconds(len(steps))
            if decode_only and plain and timings.total:  # no step with drafts is shorter than one without
                speedup = sum(len(step.tokens) for step in steps) / len(steps) * min(1.0, plain / timings.total)
                self._speedup += 0.1 * (speedup - self._speedup)

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Learns from one pass. An unusual time of a known size is attributed to the speed of the machine."""
        tuning = self.tuning
        if seconds <= 0.0:  # no clock
            return
        if self._passes.weight_near(rows) >= tuning.known:
            ratio = seconds / self.pass_seconds(rows)
            self._disturbed = self._disturbed + 1 if ratio > tuning.disturbed else 0
            if 0 < self._disturbed < tuning.passing:
                return
            change = math.log(min(tuning.max_change, max(1.0 / tuning.max_change, ratio)))
            self.level *= math.exp(change * (tuning.follow if abs(change) < tuning.jump else tuning.leap))
        elif seconds < tuning.dip * (fewer := self.level * self._passes.below(rows)):
            self.level *= seconds / fewer
        self._passes.add(rows, seconds / self.level)

    def calibrate(self, passes: Mapping[int, float], drafting: Mapping[int, float], missed: float = math.inf) -> None:
        """Replaces what was learned in the warm-up by its medians, which count until real steps show better ones.

        Args:
            passes: Seconds by rows.
            drafting: Seconds of one request's draft by depth.
            missed: Most seconds of catching up on a token.
        """
        for rows, seconds in passes.items():
            self._passes.put(rows, seconds / self.level)
        for depth, seconds in drafting.items():
            _curve(self._drafting, 1, self.tuning).put(depth, seconds)
        seconds, tokens = self._missed
        self._missed = min(seconds, missed * tokens) if tokens else 0.0, tokens
        self.discount()

    def refuse(self) -> None:
        """Lets drafting seem a little faster, after it was refused because of the seconds that it took in the warm-up.

        While nothing is drafted nothing is timed, and what other programs delayed then would be believed for ever.
        """
        if not self._confirmed:
            self._doubted = True
            self._scale_drafting(self.tuning.refused)

    def discount(self) -> None:
        """Lets everything learned so far count little beside what follows."""
        self._passes.discount(self.tuning.compared)
        for curve in (*self._drafting.values(), *self._free_drafting.values()):
            curve.discount(self.tuning.calibrated)
        self._plain.discount(self.tuning.calibrated / 4)  # the first steps show it, and everything is compared with it
        seconds, tokens = self._missed
        scale = max(1.0, tokens / 64.0)
        self._missed = seconds / scale, tokens / scale
        self._since_plain, self._confirmed = 0, False

    def describe(self) -> dict[str, Any]:
        """Returns what was learned, as JSON: seconds at the machine's present speed.

        The keys of ``pass_seconds`` are rows, of ``plain_step_seconds`` requests, of ``draft_seconds`` the number of
        requests from which a curve holds, and within it draft tokens; ``free_draft_seconds`` are those of steps in
        which no model was asked.
        """

        def scaled(curve: Curve, scale: float) -> dict[str, float]:
            return {str(size): round(scale * seconds, 9) for size, seconds in curve.points().items()}

        def by_count(curves: Curves) -> dict[str, dict[str, float]]:
            return {str(1 << bits - 1): scaled(curve, 1.0) for bits, curve in sorted(curves.items())}

        return {
            "level": round(self.level, 6),
            "pass_seconds": scaled(self._passes, self.level),
            "plain_step_seconds": scaled(self._plain, self.level),
            "draft_seconds": by_count(self._drafting),
            "free_draft_seconds": by_count(self._free_drafting),
            "missed_token_seconds": self.missed_seconds(1),
        }

    def pass_seconds(self, rows: float) -> float:
        """Returns the seconds of a pass over ``rows`` rows at the machine's present speed, 0 if none was timed."""
        return self.level * self._passes.at(rows)

    def pass_table(self, rows: Array) -> Array:
        """Returns ``pass_seconds`` of each of ``rows`` [N], which need not be integers."""
        return self.level * self._passes.over(rows)

    def pass_ratio(self, rows: Array, base: int, *, optimistic: bool = False) -> Array:
        """Returns the seconds of passes over ``rows`` [N] relative to one over ``base`` rows, which are fewer.

        Args:
            rows: Rows, which need not be integers.
            base: Rows of the pass to compare with.
            optimistic: Assume that sizes that were never timed take no longer than smaller ones.
        """
        seconds = self._passes.at(base)
        if not seconds:
            return np.ones(len(rows))
        table = self._passes.optimistic(rows) if optimistic else self._passes.over(rows)
        return np.maximum(1.0, table / seconds)

    def plain_seconds(self, batch: int) -> float:
        """Returns the seconds of a step of ``batch`` requests without drafts, 0 if none was timed."""
        return self.level * self._plain.at(batch)

    def light(self, batch: int) -> bool:
        """Returns whether a plain step is so short that the arithmetic of a mixture of methods would show in it."""
        return self.plain_seconds(batch) < self.tuning.light * batch

    def step_table(self, batch: int, rows: Array, *, optimistic: bool = False) -> Array:
        """Returns the seconds of steps of ``batch`` requests whose passes have ``rows`` [N] rows, without drafting.

        Passes and plain steps are timed at different moments, between which the speed of the machine may change. So a
        step takes as many plain steps as its pass takes plain passes, and never less than one.
        """
        plain = self.plain_seconds(batch)
        return plain * self.pass_ratio(rows, batch, optimistic=optimistic) if plain else self.pass_table(rows)

    def draft_seconds(self, depth: int, count: int, *, free: bool = False) -> float:
        """Returns the seconds of drafting ``depth`` tokens for each of ``count`` requests, 0 if none was timed.

        Args:
            depth: Draft tokens of each request.
            count: Number of requests that draft.
            free: No model is asked.
        """
        curves = self._curves(free)
        return _nearest(curves, count.bit_length()).at(depth) if curves else 0.0

    def draft_table(self, depths: Array, counts: Array, *, free: bool = False) -> Array:
        """Returns ``draft_seconds`` for each pair of ``depths`` [N] and ``counts`` [N]."""
        table, curves = np.zeros(len(depths)), self._curves(free)
        bits = np.frexp(counts)[1]  # bit lengths
        for length in range(int(bits.min()), int(bits.max()) + 1) if curves else ():
            table[bits == length] = _nearest(curves, length).over(depths[bits == length])
        return table

    def missed_seconds(self, tokens: float) -> float:
        """Returns the seconds in which a proposer processes ``tokens`` tokens that it missed."""
        seconds, count = self._missed
        return tokens * seconds / count if count else 0.0

    def plain_due(self, batch: int) -> bool:
        """Returns whether a plain step has to be timed before other steps draft."""
        tuning = self.tuning
        enough = 1.0 if self._plain.weight > tuning.first_plain else tuning.first_plain
        if self._plain.weight_near(batch, batch // 8) < enough:
            return True
        return self._since_plain >= tuning.refresh + tuning.patience * max(0.0, self._speedup - 1.0)

    def _curves(self, free: bool) -> Curves:
        return self._free_drafting if free else self._drafting

    def _scale_drafting(self, factor: float) -> None:
        """Multiplies the seconds of drafting and of catching up by ``factor``."""
        for curve in self._drafting.values():
            curve.scale(factor)
        seconds, tokens = self._missed
        self._missed = factor * seconds, tokens

    def _observe_drafting(self, depth: int, count: int, timings: Timings, free: bool) -> None:
        """Learns from the time of drafting, of which the missed tokens have a part."""
        missed, seconds, bits = timings.missed_tokens, timings.propose, count.bit_length()
        if missed <= self.tuning.slack:
            if not free:
                expected = self.draft_seconds(depth, count)
                if self._doubted and expected:  # one time shows how wrong the others are
                    self._scale_drafting(seconds / expected)
                self._confirmed, self._doubted = True, False
            _curve(self._curves(free), bits, self.tuning).add(depth, seconds)
            return
        if self._drafting:
            catching_up, usual = max(0.0, seconds - self.draft_seconds(depth, count)), self.missed_seconds(missed)
            self._delayed = self._delayed + 1 if usual and catching_up > self.tuning.disturbed * usual else 0
            if 0 < self._delayed < self.tuning.passing:
                return
        else:
            step = seconds / (depth + missed / self.tuning.missed_per_step)
            _curve(self._drafting, bits, self.tuning).add(depth, step * depth)
            catching_up = seconds - step * depth
        self._missed = 0.8 * self._missed[0] + catching_up, 0.8 * self._missed[1] + missed


def _curve(curves: Curves, bits: int, tuning: Tuning) -> Curve:
    """Returns the curve of a number of requests, which is made if there is none."""
    return curves.setdefault(bits, Curve(origin=True, tuning=tuning))


def _nearest(curves: Curves, bits: int) -> Curve:
    """Returns the curve of the nearest number of requests."""
    return curves.get(bits) or curves[min(curves, key=lambda known: abs(known - bits))]
