"""Goodput: the draft lengths with the most expected tokens per measured second, none included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretoken.control.capped import affordable, drafting_seconds, worst_case
from foretoken.costs.curve import Array
from foretoken.costs.model import CostModel


@dataclass(frozen=True, slots=True)
class LengthCandidates:
    """Requests whose draft length is decided.

    Attributes:
        places: [N], index of each in its batch.
        caps: [N], maximum number of nodes of each.
        missed: [N], seconds in which the proposer would catch up on each.
        accepted: [N, R], probability that each node is accepted, by rank.
        exists: [N, R], probability that a draft has the node.
        free: No model drafts for them.
    """

    places: Sequence[int]
    caps: Sequence[int]
    missed: Sequence[float]
    accepted: Array
    exists: Array
    free: bool = False


@dataclass(frozen=True, slots=True)
class Allocation:
    """Draft lengths of candidates.

    Attributes:
        lengths: Number of nodes by index in the batch, of those that draft.
        worst: Seconds that the step loses if all nodes are rejected; 0 where losses are not bounded.
        short: Seconds of the best allocation's worst case, if it would pay but loses more than is allowed, else 0.
        rate: Expected tokens per second, of all requests of the step.
        floors: See ``Context.floors``, by index in the batch.
    """

    lengths: dict[int, int]
    worst: float = 0.0
    short: float = 0.0
    rate: float = 0.0
    floors: Mapping[int, Sequence[float]] = field(default_factory=dict)


def goodput(
    candidates: LengthCandidates, batch: int, forced: int, costs: CostModel, allowed: float = math.inf
) -> Allocation:
    """Returns the draft lengths that maximize expected tokens per second, none where drafting does not pay.

    All pairs of a request and a rank are ordered by their probability of acceptance. Every number of them is evaluated,
    because cost curves are jagged: eight rows may cost as much as five, and nine twice as much.

    Args:
        candidates: One request or more.
        batch: Number of requests in the step.
        forced: Draft tokens that other requests asked for.
        costs: Measured seconds.
        allowed: Seconds that the step may lose.
    """
    accepted, exists = candidates.accepted, candidates.exists
    within = np.arange(accepted.shape[1]) < np.asarray(candidates.caps)[:, None]
    worth = np.minimum.accumulate(np.minimum(accepted / exists.clip(1e-9), 1.0), axis=1)
    order = np.argsort(-worth[within], kind="stable")
    owners, ranks = (indices[order] for indices in np.nonzero(within))
    gains, rows = np.cumsum(accepted[within][order]), np.cumsum(exists[within][order])
    drafting, missed = drafting_seconds(costs, owners, ranks, candidates.missed, candidates.free)
    seconds = drafting + missed / costs.tuning.horizon + costs.step_table(batch, batch + forced + rows)
    plain = _without_drafts(batch, forced, costs)

    def best(limit: int) -> int:
        """Returns the best number of nodes up to ``limit``, 0 if it does not pay."""
        value = (batch + gains[:limit]) / seconds[:limit]
        at = int(value.argmax())
        added = (seconds[at] - plain) / plain  # in plain steps
        pays = value[at] > costs.tuning.margin * batch / plain and gains[at] >= costs.tuning.caution * batch * added
        return at + 1 if pays else 0

    count, worst, short = best(len(order)), 0.0, 0.0
    if count and allowed < math.inf:
        losses = worst_case(costs, batch, (drafting + missed)[:count])
        if (limit := affordable(losses, allowed)) < count:
            short = float(losses[-1])
            count = best(limit) if limit else 0
        worst = float(losses[count - 1]) if count else 0.0
    nodes = enumerate(np.bincount(owners[:count]).tolist())
    rate = float((batch + gains[count - 1]) / seconds[count - 1]) if count else 0.0
    return Allocation({candidates.places[i]: length for i, length in nodes if length}, worst, short, rate)


def floors(length: int, count: int, rows: float, batch: int, rate: float, costs: CostModel) -> list[float]:
    """Returns the probability of acceptance from which a token of a chain pays, by depth.

    A token pays if it brings more tokens than are usual in the seconds of its row and of drafting it. Where several
    rows together take hardly longer than one, a token also pays as a step to those below it.

    All chains of a batch are priced alike: a row costs what another row for each of them costs, divided by their
    number. The seconds between neighbouring sizes of a large pass would be mostly the noise of their measurement.

    Args:
        length: Largest number of tokens of the chain.
        count: Number of requests that draft.
        rows: Rows of the pass without the chain.
        batch: Number of requests in the step.
        rate: Usual tokens per second of the step.
        costs: Measured seconds.
    """
    drafting = costs.drafting.table(np.arange(length + 1.0), np.full(length + 1, count))
    further = np.cumsum(costs.tuning.next_rank ** np.arange(length))  # tokens of 1, 2, ..., if the first is accepted
    passes = costs.step_table(batch, rows + np.arange(count * length + 1.0))
    below = []
    for depth in range(length):
        longer = passes[depth::count][: length - depth + 1]
        added = (longer[1:] - longer[0] + drafting[depth + 1 :] - drafting[depth]) / count
        below.append(float((rate * added / further[: len(added)]).min()))
    return below


def promising(length: int, missed: float, batch: int, forced: int, costs: CostModel, free: bool = False) -> bool:
    """Returns whether a draft of up to ``length`` tokens would pay if it went well and rows never timed were free.

    Args:
        length: Largest draft length.
        missed: Seconds in which the proposer would catch up.
        batch: Number of requests in the step.
        forced: Draft tokens that other requests asked for.
        costs: Measured seconds.
        free: No model drafts.
    """
    depths = np.arange(1.0, min(length, 64) + 1.0)
    passes = costs.step_table(batch, batch + forced + depths, optimistic=True)
    drafting = costs.drafting.table(depths, np.ones(len(depths)), free=free)
    seconds = drafting + missed / costs.tuning.horizon + passes
    value = (batch + np.cumsum(costs.tuning.trial_hope**depths)) / seconds
    return bool(value.max() > costs.tuning.margin * batch / _without_drafts(batch, forced, costs))


def _without_drafts(batch: int, forced: int, costs: CostModel) -> float:
    """Returns the seconds of a step in which only those draft that asked for it."""
    return costs.pass_seconds(batch + forced) if forced else costs.plain_seconds(batch)
