"""The cost model: seconds of plain steps, forward passes and drafting, learned from the steps of an engine."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.core.step import StepOutput, Timings, is_decode_only
from foretoken.costs.curve import Curve
from foretoken.costs.displacement import Displacement
from foretoken.costs.drafting import DraftingTimes
from foretoken.costs.tuning import TUNING, Tuning


class CostModel:
    """Seconds of passes by rows, of plain steps by batch, of drafting by depth and batch, and of missed tokens.

    The engine passes every step to ``observe`` once. Controllers and proposers only read.

    Passes of different sizes are compared at one speed of the machine, and ``level`` follows that speed: a slow minute
    makes no size more expensive than another. Steps with prefill teach nothing about passes.

    A model that drafts displaces the target's weights from the processor's caches, so the pass behind it and the next
    plain steps take longer. That is a cost of drafting: ``drafting`` includes it, passes and plain steps do not.

    Attributes:
        drafting: Seconds of drafting.
        displacement: Seconds that passes take longer after drafting.
        search_seconds: Seconds by which searching text to copy for one request makes a step longer.
        level: Seconds of a pass relative to those of the first observed passes.
    """

    def __init__(self, tuning: Tuning = TUNING) -> None:
        self.tuning, self.level = tuning, 1.0
        self._passes, self._plain = Curve(tuning=tuning), Curve(tuning=tuning)  # at level 1, by rows and by batch
        self.drafting = DraftingTimes(tuning)
        self.search_seconds = 0.0
        self._disturbed = 0  # disturbed passes in a row
        self._since_plain = self._since_settled = 0  # steps since a plain one, since a settled one was timed
        self._first_steps = tuning.trusted_steps + tuning.weak_steps  # plain ones: one alone may be disturbed
        self.displacement = Displacement(tuning)
        self._speedup = 1.0  # moving average over the steps with drafts

    @property
    def known(self) -> bool:
        """Whether any pass was timed."""
        return self._passes.weight > 0.0

    def observe(self, steps: Sequence[StepOutput]) -> None:
        """Learns from the outputs of one step."""
        if not steps:
            return
        timings, drafting = steps[0].timings, [step for step in steps if step.budget > 0]
        batch, drafted = len(steps), sum([len(step.draft.ids) for step in steps])
        levels = [step.levels for step in drafting if step.levels]
        decode_only = is_decode_only(steps)
        self.displacement.count(bool(levels), not decode_only)
        pass_seconds = timings.total - timings.propose
        if decode_only and levels and (expected := self.displacement.level * self._passes.at(batch + drafted)):
            self.displacement.learn(pass_seconds / expected)
        factor = self.displacement.factor
        if decode_only:
            self._since_plain, self._since_settled = self._since_plain + 1, self._since_settled + 1
            level = self.level  # a pass of a size that is rare changes it for a moment
            self.observe_pass(batch + drafted, pass_seconds / factor)
            if not drafted and not drafting:
                self._observe_plain(batch, timings.total / factor / level)
        if not drafting:
            return
        # A chain that ended at once took its time. Where nothing says that a pass was made, the model was not ready.
        if levels and (drafted or any(step.draft.levels for step in drafting)):
            displaced = pass_seconds * (1.0 - 1.0 / factor)
            self.drafting.observe(max(levels), len(levels), timings.propose + displaced, timings.missed_tokens)
        if not levels and self.displacement.settled:
            self._observe_search(len(drafting), timings, 0.0 if drafted else self.plain_seconds(batch))
        if drafted:
            plain = self.plain_seconds(batch)
            if decode_only and plain and timings.total:  # no step with drafts is shorter than one without
                speedup = sum([len(step.tokens) for step in steps]) / batch * min(1.0, plain / timings.total)
                self._speedup += 0.1 * (speedup - self._speedup)

    def _observe_search(self, count: int, timings: Timings, plain: float) -> None:
        """Learns from a step that searched for ``count`` requests; without drafts its pass, too, is compared: code and
        text displace the target's weights.
        """
        added = min(timings.total - plain, (self.tuning.clip_ratio - 1.0) * plain)
        self.search_seconds += 0.1 * (max(timings.propose, added) / count - self.search_seconds)

    def _observe_plain(self, batch: int, seconds: float) -> None:
        """Learns from a plain step that took ``seconds`` at level 1."""
        settled = self.displacement.settled
        if (self._since_settled if settled else self._since_plain) >= self.tuning.refresh_steps:
            self._plain.discount(self.tuning.trusted_steps)
        self._plain.add(batch, seconds)
        self._since_plain = 0
        if settled:
            self._since_settled = 0
            self.displacement.settle(self.level)

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Learns from one pass. An unusual time of a known size is attributed to the speed of the machine."""
        tuning = self.tuning
        if seconds <= 0.0:  # no clock
            return
        if self._passes.weight_near(rows) >= tuning.trusted_steps:
            ratio = seconds / self.pass_seconds(rows)
            self._disturbed = self._disturbed + 1 if ratio > tuning.outlier_ratio else 0
            if 0 < self._disturbed <= tuning.trusted_steps:
                return
            self.level *= min(2.0, max(0.5, ratio)) ** tuning.follow_share
        elif seconds < (fewer := self.level * self._passes.below(rows)):  # more rows in less time: a faster machine
            self.level *= seconds / fewer
        self._passes.add(rows, seconds / self.level)

    def calibrate(
        self,
        passes: Mapping[int, float],
        drafting: Mapping[int, float],
        missed: float = math.inf,
        settled: float = math.inf,
    ) -> None:
        """Replaces what was learned in the warm-up by its medians, which count until real steps show better ones.

        Args:
            passes: Seconds by rows.
            drafting: Seconds of one request's draft by depth.
            missed: Maximum seconds of a missed token.
            settled: Seconds of a plain step long after drafting, if the passes were timed behind drafting.
        """
        ratio = 1.0
        if known := settled < math.inf and 1 in passes:
            ratio = max(1.0, min(passes[1] / settled, 2.0))
            self.displacement.calibrate(ratio, self.level)
        for rows, seconds in passes.items():
            self._passes.put(rows, seconds / ratio / self.level)
        share = 1.0 - 1.0 / ratio  # of passes behind drafting: a cost of drafting
        drafts = {depth: seconds + share * passes.get(depth + 1, 0.0) for depth, seconds in drafting.items()}
        self.drafting.calibrate(drafts, missed)
        self.discount()
        if known:
            self._plain = Curve(tuning=self.tuning)
            self._plain.add(1, settled / self.level)

    def discount(self) -> None:
        """Lets everything learned so far count little beside what follows."""
        self._passes.discount(self.tuning.trusted_steps)
        self._plain.discount(self.tuning.weak_steps)
        self.drafting.discount()
        self._since_plain = self._since_settled = 0

    def describe(self) -> dict[str, Any]:
        """Returns the measured seconds, as JSON: seconds at the machine's present speed.

        The keys of ``pass_seconds`` are rows, of ``plain_step_seconds`` requests, of ``draft_seconds`` the number of
        requests from which a curve holds, and within it draft tokens.
        """

        def scaled(curve: Curve, scale: float) -> dict[str, float]:
            return {str(size): round(scale * seconds, 9) for size, seconds in curve.points().items()}

        return {
            "level": round(self.level, 6),
            "pass_seconds": scaled(self._passes, self.level),
            "plain_step_seconds": scaled(self._plain, self.level),
        } | self.drafting.describe(lambda curve: scaled(curve, 1.0))

    def pass_seconds(self, rows: float) -> float:
        """Returns the seconds of a pass over ``rows`` rows at the machine's present speed, 0 if none was timed."""
        return self.level * self._passes.at(rows)

    def pass_ratio(self, rows: float, base: int) -> float:
        """Returns the seconds of a pass over ``rows`` rows relative to one over ``base`` rows, which are fewer."""
        seconds = self._passes.at(base)
        return max(1.0, self._passes.between(rows) / seconds) if seconds else 1.0

    def plain_seconds(self, batch: int) -> float:
        """Returns the seconds of a step of ``batch`` requests without drafts, 0 if none was timed."""
        return self.level * self._plain.at(batch)

    def step_seconds(self, batch: int) -> Callable[[float], float]:
        """Returns the seconds of steps of ``batch`` requests by the rows of their passes, without drafting.

        Passes and plain steps are timed at different moments, between which the speed of the machine may change. So a
        step takes as many plain steps as its pass takes plain passes, and never less than one.
        """
        plain, passes, level = self.plain_seconds(batch), self._passes, self.level
        if not plain:
            return lambda rows: level * passes.between(rows)
        base = passes.at(batch)
        return lambda rows: plain * max(1.0, passes.between(rows) / base) if base else plain

    def plain_due(self, batch: int) -> bool:
        """Returns whether a plain step has to be timed before other steps draft."""
        tuning, first = self.tuning, self._first_steps
        enough = 1.0 if self._plain.weight > first else first
        if self._plain.weight_of(batch) < enough and self._plain.weight_near(batch, batch // 8) < enough:
            return True
        every, steps = self._plain_every, tuning.settle_steps
        late = self._since_settled - steps * every * self.displacement.certainty
        # Where others' prefill keeps the caches from settling, drafts do not wait for it.
        return (self.displacement.passes > 0 and 0 <= late < 2 * steps) or self._since_plain >= every

    @property
    def _plain_every(self) -> float:
        """Number of steps between two timed plain ones: their time is at most a share of speculation's gain."""
        return self.tuning.refresh_steps + max(0.0, self._speedup - 1.0) / self.tuning.timing_share
