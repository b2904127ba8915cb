"""Counts of steps by request: the numerators and denominators of every prediction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from foretoken.core.positions import PositionCounts
from foretoken.core.step import StepOutput
from foretoken.plan.texts import SampledText


@dataclass(slots=True)
class StepTally:
    """Steps of one request after its prefill. Expected values where the estimator computes expectations.

    Args:
        tokens: Emitted tokens.
        steps: Number of steps.
        positions: Steps by draft position.
        sizes: Steps by number of draft tokens.
    """

    tokens: float = 0.0
    steps: float = 0.0
    positions: PositionCounts = field(default_factory=PositionCounts)
    sizes: dict[int, float] = field(default_factory=dict)

    def add(self, step: StepOutput) -> None:
        """Counts one step, unless it is the prompt's."""
        if step.position == 0:
            return
        self.tokens += len(step.tokens)
        self.steps += 1
        self.add_size(len(step.draft))
        self.positions.add(max(step.draft.depths, default=0), step.accepted)

    def add_size(self, size: int, weight: float = 1.0) -> None:
        """Counts a step with ``size`` draft tokens."""
        self.sizes[size] = self.sizes.get(size, 0.0) + weight


@dataclass(frozen=True, slots=True)
class AcceptanceEstimate:
    """Tokens, steps and acceptance of one proposer at one draft length on the sample.

    Args:
        tallies: One per text.
        estimator: "distribution" (see ``chains``), "text" or "steps" (see ``replay``).
        texts: Texts that the steps sampled, where they did not run on the sample's.
        draws: Number of such texts of each request.
    """

    tallies: tuple[StepTally, ...]
    estimator: str
    texts: tuple[SampledText, ...] = ()
    draws: int = 1

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

    def times(self, factor: float) -> AcceptanceEstimate:
        """Returns the estimate with tokens per pass multiplied by ``factor``, but at least 1, by scaling the steps."""
        factor = max(factor, 1.0 / self.tokens_per_pass)
        return replace(self, tallies=tuple(replace(each, steps=each.steps / factor) for each in self.tallies))

    @property
    def sizes(self) -> dict[int, float]:
        """Shares of the steps by number of draft tokens. No token is drafted where there are no steps."""
        total = StepTally()
        for tally in self.tallies:
            for size, count in tally.sizes.items():
                total.add_size(size, count)
        shares = {size: count / sum(total.sizes.values()) for size, count in sorted(total.sizes.items())}
        return shares or {0: 1.0}

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By position: steps that accepted so deep over steps that drafted so deep."""
        total = PositionCounts()
        for tally in self.tallies:
            total.merge(tally.positions)
        return total.rates
