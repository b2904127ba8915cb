"""What rounds brought, counted by request: the numerators and denominators of every prediction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from foretoken.core.step import StepOutput
from foretoken.plan.texts import SampledText


@dataclass(slots=True)
class StepTally:
    """One request's rounds after the one that holds its prompt; expectations where the estimator knows them.

    drafted_at, accepted_at: rounds that drafted, and accepted, as deep as each position. sizes: rounds by drafted
    nodes.
    """

    tokens: float = 0.0
    rounds: float = 0.0
    drafted_at: dict[int, float] = field(default_factory=dict)
    accepted_at: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, float] = field(default_factory=dict)

    def add(self, step: StepOutput) -> None:
        if step.position == 0:
            return
        self.tokens += len(step.tokens)
        self.rounds += 1
        count(self.sizes, len(step.draft))
        for position in range(max(step.draft.depths, default=0)):
            count(self.drafted_at, position)
        for position in range(step.accepted):
            count(self.accepted_at, position)


@dataclass(frozen=True, slots=True)
class AcceptanceEstimate:
    """What one proposer at one depth does on the sample. estimator: "text", "law" or "rounds", see the module.

    texts: that the rounds wrote, where the sample's were not what they ran on. draws: such texts of each request.
    """

    tallies: tuple[StepTally, ...]
    estimator: str
    texts: tuple[SampledText, ...] = ()
    draws: int = 1

    @property
    def tokens(self) -> list[float]:
        return [tally.tokens for tally in self.tallies if tally.rounds > 0]

    @property
    def rounds(self) -> list[float]:
        return [tally.rounds for tally in self.tallies if tally.rounds > 0]

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens over passes, prompts' left out; 1 where there is nothing to count."""
        return sum(self.tokens) / sum(self.rounds) if self.rounds else 1.0

    @property
    def requests(self) -> int:
        """That had a round."""
        return len(self.rounds) // self.draws

    def times(self, factor: float) -> AcceptanceEstimate:
        """So many times as many tokens a pass, but one at least: as many fewer rounds."""
        factor = max(factor, 1.0 / self.tokens_per_pass)
        return replace(self, tallies=tuple(replace(each, rounds=each.rounds / factor) for each in self.tallies))

    @property
    def sizes(self) -> dict[int, float]:
        """Shares of the rounds by drafted nodes."""
        found = self._sum("sizes")
        return {size: count / sum(found.values()) for size, count in sorted(found.items())}

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By position: rounds that accepted so deep over rounds that drafted so deep."""
        drafted, accepted = self._sum("drafted_at"), self._sum("accepted_at")
        return tuple(accepted.get(at, 0.0) / drafted[at] for at in sorted(drafted))

    def _sum(self, name: str) -> dict[int, float]:
        total: dict[int, float] = {}
        for tally in self.tallies:
            for key, value in getattr(tally, name).items():
                count(total, key, value)
        return total


def count(counts: dict[int, float], key: int, value: float = 1.0) -> None:
    """Add to an entry that may not be there yet."""
    counts[key] = counts.get(key, 0.0) + value
