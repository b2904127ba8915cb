"""Selects the nodes of a draft that pay for their rows, by the measured time of the target's passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretoken.costs.curve import Array
from foretoken.costs.model import CostModel


class DraftingCosts:
    """Seconds of drafts of different sizes, in units of a pass over one row until passes were timed."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def seconds(self, nodes: float, batch: int) -> float:
        """Returns one sequence's share of a pass in which each of ``batch`` sequences drafts ``nodes`` nodes."""
        return float(self._seconds(np.asarray([nodes]), batch)[0])

    def table(self, max_nodes: int, batch: int) -> Array:
        """Returns ``seconds`` of 1, 2, ... ``max_nodes`` nodes."""
        return self._seconds(np.arange(1.0, max_nodes + 1.0), batch)

    def worthwhile(self, weights: Sequence[float], budget: int, batch: int, held: Sequence[int] = ()) -> list[int]:
        """Returns the nodes that maximize expected tokens per second, the best first.

        Every number of nodes is evaluated, since eight rows may take as long as five, and nine much longer. Weights
        only fall along a path, and of equals the older node comes first, so no node is kept without its parent.

        Args:
            weights: Probability that each node is accepted.
            budget: Maximum number of nodes.
            batch: Number of sequences in the pass.
            held: Nodes that are kept in any case, with their parents.
        """
        kept = list(held[:budget])
        others = sorted(set(range(len(weights))).difference(held), key=lambda i: (-weights[i], i))
        others = others[: budget - len(kept)]
        tokens = 1.0 + sum(weights[node] for node in kept) + np.cumsum([0.0, *(weights[node] for node in others)])
        seconds = self._seconds(np.arange(float(len(kept)), len(kept) + len(others) + 1.0), batch)
        return kept + others[: int(np.argmax(tokens / seconds))]

    def _seconds(self, nodes: Array, batch: int) -> Array:
        rows = (nodes + 1.0) * batch
        return (
            self._costs.pass_table(rows) if self._costs.known else 1.0 + self._costs.tuning.row_share * (rows - 1.0)
        ) / batch
