"""Acceptance by draft position."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PositionCounts:
    """Steps by draft position. Entry i of both lists belongs to position i.

    Args:
        drafted: Number of steps that drafted a token at the position, an expected number where steps are expected.
        accepted: Number of those steps that accepted it.
    """

    drafted: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """Counts one step with drafts at ``drafted`` positions, of which the first ``accepted`` were accepted."""
        self._extend(drafted)
        for position in range(drafted):
            self.drafted[position] += 1
        for position in range(accepted):
            self.accepted[position] += 1

    def merge(self, other: PositionCounts) -> None:
        self._extend(len(other.drafted))
        for position, (drafted, accepted) in enumerate(zip(other.drafted, other.accepted, strict=True)):
            self.drafted[position] += drafted
            self.accepted[position] += accepted

    @property
    def rates(self) -> tuple[float, ...]:
        """Accepted over drafted by position, 0 where nothing was drafted."""
        return tuple(a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True))

    def _extend(self, length: int) -> None:
        missing = length - len(self.drafted)
        if missing > 0:
            self.drafted += [0] * missing
            self.accepted += [0] * missing
