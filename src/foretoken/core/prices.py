"""What a draft costs at present, so that a proposer can leave out what would not pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftPrices:
    """Seconds of a draft, as the tokens that a step usually brings in them.

    Attributes:
        nodes: What 0, 1, 2, ... nodes cost in the target's pass. They never fall, and the first is 0.
        level: What a pass of the drafting model costs.
    """

    nodes: Sequence[float]
    level: float = 0.0

    def next(self, count: int) -> float:
        """Returns what another node costs after ``count``: the least average of those that may follow.

        Where several rows together take hardly longer than one, a node also pays as a step to those below it. No node
        follows the last one that has a price.
        """
        further = self.nodes[count + 1 :]
        return min(((cost - self.nodes[count]) / i for i, cost in enumerate(further, 1)), default=float("inf"))
