"""Counts of steps by request: the numerators and denominators of every prediction."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

from foretoken.core.positions import PositionCounts
from foretoken.core.step import StepOutput
from foretoken.plan.statistics import ratio_interval
from foretoken.plan.texts import SampledText


@dataclass(slots=True)
class StepTally:
    """Steps of one request after its prefill. Expected values where the estimator computes expectations."""

    tokens: float = 0.0  # emitted
    steps: float = 0.0
    positions: PositionCounts = field(default_factory=PositionCounts)  # steps by draft position
    sizes: dict[int, float] = field(default_factory=dict)  # steps by number of draft tokens

    def add(self, step: StepOutput) -> None:
        """Counts one step, unless it is the prompt's."""
        if step.position == 0:
            return
        self.tokens += len(step.tokens)
        self.steps += 1
        self.sizes[len(step.draft)] = self.sizes.get(len(step.draft), 0.0) + 1.0
        self.positions.add(max(step.draft.depths, default=0), step.accepted)


@dataclass(frozen=True, slots=True)
class AcceptanceEstimate:
    """Tokens, steps and acceptance of one proposer at one draft length on the sample."""

    tallies: tuple[StepTally, ...]  # one per text
    estimator: str  # "distribution" (see ``chains``), "text" or "steps" (see ``replay``)
    texts: tuple[SampledText, ...] = ()  # those that the steps sampled, where they did not run on the sample's
    draws: int = 1  # number of such texts of each request

    @property
    def tokens(self) -> list[float]:
        """Emitted tokens of each text that had a step."""
        return [tally.tokens for tally in self.tallies if tally.steps > 0]

    @property
    def steps(self) -> list[float]:
        """Steps of each text that had one."""
        return [tally.steps for tally in self.tallies if tally.steps > 0]

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens over target passes, without prefill. 1 if there are no steps."""
        return sum(self.tokens) / sum(self.steps) if self.steps else 1.0

    @property
    def requests(self) -> int:
        """Number of requests that had a step."""
        return len(self.steps) // self.draws

    @property
    def spread(self) -> float:
        """Half the width of the interval of log(tokens per pass) for another sample of as many requests.

        Infinite for one request. The other sample has one text per request, whose variance is that of the mean over all
        draws times their number.
        """
        if self.requests < 2:
            return math.inf
        return math.sqrt(1 + self.draws) * ratio_interval(self.tokens, self.steps).width

    def times(self, factor: float) -> AcceptanceEstimate:
        """Returns the estimate with tokens per pass multiplied by ``factor``, but at least 1, by scaling the steps."""
        factor = max(factor, 1.0 / self.tokens_per_pass)
        return replace(self, tallies=tuple(replace(each, steps=each.steps / factor) for each in self.tallies))

    @property
    def sizes(self) -> dict[int, float]:
        """Fractions of the steps by number of draft tokens. No token is drafted where there are no steps."""
        counts: dict[int, float] = defaultdict(float)
        for size, count in (pair for tally in self.tallies for pair in tally.sizes.items()):
            counts[size] += count
        total = sum(counts.values())
        return {size: count / total for size, count in sorted(counts.items())} or {0: 1.0}

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By position: steps that accepted so deep over steps that drafted so deep."""
        total = PositionCounts()
        for tally in self.tallies:
            total.merge(tally.positions)
        return total.rates
