"""Draft lengths of a model for all requests of a step: the most expected tokens per measured second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.control.acceptance import Survival, acceptance
from foretoken.costs.curve import Array, Indices
from foretoken.costs.model import CostModel


@dataclass(frozen=True, slots=True)
class LengthCandidates:
    """Requests whose draft lengths are decided together.

    Attributes:
        caps: [N], maximum number of nodes of each.
        missed: [N], seconds in which the model would process the tokens that it missed.
        accepted: [N, R], probability that each node is accepted, by rank.
        exists: [N, R], probability that a draft has the node.
    """

    caps: Sequence[int]
    missed: Sequence[float]
    accepted: Array
    exists: Array

    @staticmethod
    def of(survivals: Sequence[Survival], caps: Sequence[int], missed: Sequence[float]) -> LengthCandidates:
        """Returns candidates with these estimates."""
        return LengthCandidates(caps, missed, *acceptance(survivals))


@dataclass(frozen=True, slots=True)
class Allocation:
    """Draft lengths of candidates.

    Attributes:
        lengths: Number of nodes of each.
        gains: Expected accepted tokens of each.
        values: These, less the price of their seconds at the speed of the step.
        worst: Seconds that the step loses if all nodes are rejected.
        rate: Expected tokens per second, of all requests of the step.
    """

    lengths: Sequence[int]
    gains: Sequence[float]
    values: Sequence[float]
    worst: float = 0.0
    rate: float = 0.0


class Worst:
    """Seconds that steps of ``batch`` requests lose if all draft tokens are rejected."""

    def __init__(self, costs: CostModel, batch: int) -> None:
        self._costs, self._batch = costs, batch

    def table(self, proposing: Array) -> Array:
        """Returns the loss with 1, 2, ... nodes [N], whose drafting takes ``proposing`` seconds [N]."""
        rows = self._batch + np.arange(1.0, len(proposing) + 1.0)
        plain = self._costs.plain_seconds(self._batch)
        return np.asarray(proposing + np.maximum(0.0, self._costs.step_table(self._batch, rows) - plain))

    def affordable(self, proposing: Array, allowed: float) -> int:
        """Returns the number of nodes, in their order, that may be drafted if ``allowed`` seconds may be lost."""
        over = self.table(proposing) > allowed
        return int(np.argmax(over)) if over.any() else len(over)

    def trial(self, length: int, missed: float, allowed: float) -> int:
        """Returns the largest affordable length of one request's draft, at most ``length``."""
        depths = np.arange(1.0, length + 1.0)
        return self.affordable(self._costs.drafting.table(depths, np.ones(length)) + missed, allowed)


def allocate(
    candidates: LengthCandidates, batch: int, costs: CostModel, allowed: float, constant: bool, early: Sequence[bool]
) -> Allocation:
    """Returns the draft lengths that maximize expected tokens per second, 0 where drafting is not profitable.

    All pairs of a request and a rank are ordered by their probability of acceptance, and every number of them is
    evaluated, because cost curves are jagged: eight rows may cost as much as five, and nine twice as much.

    Args:
        candidates: One request or more.
        batch: Number of requests in the step.
        costs: Measured seconds.
        allowed: Seconds that the step may lose.
        constant: Draft as much as may be lost.
        early: Whether each request's drafts end early, so that they get the largest length that may be lost.
    """
    accepted, exists = candidates.accepted, candidates.exists
    within = np.arange(accepted.shape[1]) < np.asarray(candidates.caps)[:, None]
    chances = np.minimum.accumulate(np.minimum(accepted / exists.clip(1e-9), 1.0), axis=1)
    order = np.argsort(-chances[within], kind="stable")
    owners, ranks = (indices[order] for indices in np.nonzero(within))
    gains, rows = np.cumsum(accepted[within][order]), np.cumsum(exists[within][order])
    drafting, missed = _drafting(costs, owners, ranks, candidates.missed)
    seconds = drafting + missed / costs.tuning.horizon_steps + costs.step_table(batch, batch + rows)
    plain = costs.plain_seconds(batch)
    limit = Worst(costs, batch).affordable(drafting + missed, allowed)
    none = [0.0] * len(candidates.caps)
    nothing = Allocation([0] * len(candidates.caps), none, none)
    if not limit:
        return nothing
    value = (batch + gains[:limit]) / seconds[:limit]
    count = limit if constant else int(value.argmax()) + 1
    added = (seconds[count - 1] - plain) / plain  # in plain steps
    if not constant and gains[count - 1] < batch * (added + costs.tuning.margin_tokens):
        return nothing
    lengths = np.bincount(owners[:count], minlength=len(candidates.caps)).tolist()
    worst = float(Worst(costs, batch).table(drafting + missed)[count - 1])
    if any(early) and not constant:
        lengths, worst = _lengthened(lengths, candidates, early, batch, costs, allowed, worst)
    drafting_count = max(1, sum(length > 0 for length in lengths))
    gain, price = float(gains[count - 1]) / drafting_count, float(batch * added) / drafting_count
    expected = [gain if length else 0.0 for length in lengths]
    values = [gain - price if length else 0.0 for length in lengths]
    return Allocation(lengths, expected, values, worst, float(value[count - 1]))


def min_acceptance(best: Allocation, number: int, batch: int, costs: CostModel) -> list[float]:
    """Returns the probability of acceptance from which a token of a chain is profitable, by depth.

    A token is profitable if it brings more tokens than are usual in the seconds of its row and of drafting it. Where
    several rows together take hardly longer than one, a token also counts as a step to those below it. A row costs what
    another row for each drafting request costs, divided by their number: the seconds between neighbouring sizes of a
    large pass would be mostly the noise of their measurement.

    Args:
        best: The allocation.
        number: Index of the request.
        batch: Number of requests in the step.
        costs: Measured seconds.
    """
    length, count = best.lengths[number], sum(other > 0 for other in best.lengths)
    drafting = costs.drafting.table(np.arange(length + 1.0), np.full(length + 1, count))
    further = np.cumsum(costs.tuning.prior_acceptance ** np.arange(length))  # accepted tokens of 1, 2, ... nodes
    passes = costs.step_table(batch, batch + np.arange(count * length + 1.0))
    below = []
    for depth in range(length):
        longer = passes[depth::count][: length - depth + 1]
        added = (longer[1:] - longer[0] + drafting[depth + 1 :][: len(longer) - 1] - drafting[depth]) / count
        below.append(float((best.rate * added / further[: len(added)]).min()))
    return below


def _drafting(costs: CostModel, owners: Indices, ranks: Indices, missed: Sequence[float]) -> tuple[Array, Array]:
    """Returns the seconds of drafting the first 1, 2, ... nodes, and of processing missed tokens before, [N] each."""
    first = ranks == 0
    drafting = costs.drafting.table(np.maximum.accumulate(ranks) + 1, np.cumsum(first))
    return drafting, np.cumsum(np.where(first, np.asarray(missed)[owners], 0.0))


def _lengthened(
    lengths: Sequence[int],
    candidates: LengthCandidates,
    early: Sequence[bool],
    batch: int,
    costs: CostModel,
    allowed: float,
    worst: float,
) -> tuple[list[int], float]:
    """Extends drafts that end early to the longest length whose worst case fits, and returns that worst case."""
    ending = [i for i, ends in enumerate(early) if ends]
    longest = max(candidates.caps[i] for i in ending)
    while longest >= max(lengths):
        longer = list(lengths)
        for i in ending:
            longer[i] = max(lengths[i], min(candidates.caps[i], longest))
        missed = sum(seconds for seconds, length in zip(candidates.missed, longer, strict=True) if length)
        drafting = costs.drafting.seconds(max(longer), sum(length > 0 for length in longer))
        loss = float(Worst(costs, batch).table(np.full(sum(longer), drafting + missed))[-1])
        if loss <= allowed:
            return longer, loss
        longest //= 2
    return list(lengths), worst
