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

    @property
    def known(self) -> bool:
        """Whether seconds are measured."""
        return self._costs.known

    def seconds(self, nodes: float, batch: int) -> float:
        """Returns one sequence's share of a pass in which each of ``batch`` sequences drafts ``nodes`` nodes."""
        return float(self.table(np.asarray([nodes]), batch)[0])

    def table(self, nodes: Array, batch: int) -> Array:
        """Returns ``seconds`` of each number of ``nodes`` [N], which need not be integers."""
        rows = (nodes + 1.0) * batch
        if self._costs.known:
            return self._costs.pass_table(rows) / batch
        return np.asarray((1.0 + self._costs.tuning.row_share * (rows - 1.0)) / batch)

    def row(self, max_nodes: int, batch: int) -> float:
        """Returns the seconds that a node takes at least, in the cheapest draft of up to ``max_nodes`` nodes."""
        seconds = self.table(np.arange(max_nodes + 1.0), batch)
        return max(0.0, float(((seconds[1:] - seconds[0]) / np.arange(1.0, max_nodes + 1.0)).min()))

    def worthwhile(self, weights: Sequence[float], budget: int, batch: int, rate: float = 0.0) -> list[int]:
        """Returns the nodes that maximize expected tokens per second, the best first.

        A step is not all there is: where ``rate`` tokens per second are usual, a node pays if it brings more than the
        usual tokens in its seconds, so confident steps get more nodes than others (Dinkelbach's method). Without a rate
        the step's own tokens per second are maximized.

        Every number of nodes is evaluated, since eight rows may take as long as five, and nine much longer. Weights
        only fall along a path, and of equals the older node comes first, so no node is kept without its parent.

        Args:
            weights: Probability that each node is accepted.
            budget: Maximum number of nodes.
            batch: Number of sequences in the pass.
            rate: Usual tokens per second of one sequence's share of passes, 0 if unknown.
        """
        nodes = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[:budget]
        tokens = 1.0 + np.cumsum([0.0, *(weights[node] for node in nodes)])
        seconds = self.table(np.arange(len(nodes) + 1.0), batch)
        return nodes[: int(np.argmax(tokens - rate * seconds if rate else tokens / seconds))]
