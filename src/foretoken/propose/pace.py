"""What a row costs: the time of the target's passes by how many rows they have, learned from the rounds themselves."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core.step import Step, steady

_FADE = 0.98
_ROW = 0.03  # a row's share of a one-row pass until it is known: what a CPU takes
_MOST = 0.5  # and the largest share that is believed


class Pace:
    """seconds = base + row x rows, by least squares over recent rounds, old ones fading.

    Rounds that bring in a prompt are left out, and so are those that took several times what was expected: a passing
    disturbance, not the model.
    """

    def __init__(self) -> None:
        self._moments = [0.0] * 5  # of 1, rows, rows^2, seconds, rows x seconds
        self._row = _ROW

    def observe(self, steps: Sequence[Step]) -> None:
        if not steps or not steady(steps):
            return
        rows = float(sum(len(step.draft) + 1 for step in steps))
        timings = steps[0].timings
        taken = timings.score + timings.verify + timings.commit
        if self._moments[0] >= 8.0 and taken > 4.0 * self._seconds(rows):
            return
        fresh = (1.0, rows, rows * rows, taken, rows * taken)
        self._moments = [_FADE * old + value for old, value in zip(self._moments, fresh, strict=True)]
        self._fit()

    def seconds(self, nodes: float, batch: int) -> float:
        """One sequence's share of a pass in which each of ``batch`` drafts so many nodes; in passes until measured."""
        return self._seconds((nodes + 1.0) * batch) / batch

    def worthwhile(self, weights: Sequence[float], budget: int, batch: int, held: Sequence[int] = ()) -> list[int]:
        """The nodes whose rows pay, the best first: each raises expected tokens per second. weights: P(node stands).

        Along a path weights only fall, and of equals the older comes first, so that no node is kept without its parent.
        held: nodes that are kept in any case, with their parents.
        """
        kept = list(held[:budget])
        tokens = 1.0 + sum(weights[node] for node in kept)
        least = self.seconds(0, batch)
        row = self.seconds(1, batch) - least
        others = sorted(set(range(len(weights))).difference(held), key=lambda i: (-weights[i], i))
        for node in others[: budget - len(kept)]:
            if weights[node] * (least + row * len(kept)) <= row * tokens:
                break
            kept.append(node)
            tokens += weights[node]
        return kept

    def _seconds(self, rows: float) -> float:
        count, sum_rows, _, sum_seconds, _ = self._moments
        if count == 0.0:
            return 1.0 + self._row * (rows - 1.0)
        # Through the centre of what was seen, with the slope given as a share of a one-row pass.
        one = (sum_seconds / count) / (1.0 + self._row * (sum_rows / count - 1.0))
        return one * (1.0 + self._row * (rows - 1.0))

    def _fit(self) -> None:
        count, rows, squares, seconds, products = self._moments
        spread = count * squares - rows * rows
        if count < 8.0 or spread < 0.5 * count * count:  # all of one size tell nothing of another
            return
        slope = (count * products - rows * seconds) / spread
        one = seconds / count - slope * (rows / count - 1.0)
        if one > 0.0:
            self._row = min(_MOST, max(0.0, slope / one))
        elif slope > 0.0:
            self._row = _MOST
