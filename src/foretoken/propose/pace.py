"""Which nodes are worth their rows, by the time of the target's passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretoken.control.curve import Array
from foretoken.control.passes import Passes
from foretoken.core.step import StepOutput

_ROW = 0.03  # a row's share of a one-row pass until it is known: what a CPU takes


class DraftingCosts:
    """What is drafted beside what it takes. passes: shared with others that learn of the same rounds."""

    def __init__(self, passes: Passes | None = None) -> None:
        self._passes = passes or Passes()

    def observe(self, steps: Sequence[StepOutput]) -> None:
        self._passes.observe(steps)

    def seconds(self, nodes: float, batch: int) -> float:
        """One sequence's share of a pass in which each of ``batch`` drafts so many nodes; in passes until measured."""
        return float(self._seconds(np.asarray([nodes]), batch)[0])

    def table(self, most: int, batch: int) -> Array:
        """``seconds`` of 1, 2, ... ``most`` nodes."""
        return self._seconds(np.arange(1.0, most + 1.0), batch)

    def worthwhile(self, weights: Sequence[float], budget: int, batch: int, held: Sequence[int] = ()) -> list[int]:
        """The nodes whose rows pay, the best first: so many that expected tokens per second are most. Every number is
        looked at, since eight rows may take what five do, and nine much more.

        Along a path weights only fall, and of equals the older comes first, so that no node is kept without its parent.
        weights: P(node stands). held: nodes that are kept in any case, with their parents.
        """
        kept = list(held[:budget])
        others = sorted(set(range(len(weights))).difference(held), key=lambda i: (-weights[i], i))
        others = others[: budget - len(kept)]
        tokens = 1.0 + sum(weights[node] for node in kept) + np.cumsum([0.0, *(weights[node] for node in others)])
        seconds = self._seconds(np.arange(float(len(kept)), len(kept) + len(others) + 1.0), batch)
        return kept + others[: int(np.argmax(tokens / seconds))]

    def _seconds(self, nodes: Array, batch: int) -> Array:
        rows = (nodes + 1.0) * batch
        return (self._passes.over(rows) if self._passes.known else 1.0 + _ROW * (rows - 1.0)) / batch
