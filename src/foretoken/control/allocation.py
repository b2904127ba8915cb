"""Draft lengths of a model for all requests of a step: the most expected tokens per measured second."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from foretoken.control.acceptance import Survival
from foretoken.costs.model import CostModel


@dataclass(frozen=True, slots=True)
class LengthCandidates:
    """Requests whose draft lengths are decided together."""

    caps: Sequence[int]  # [N], maximum number of nodes of each
    missed: Sequence[float]  # [N], seconds in which the model would process the tokens that it missed
    accepted: Sequence[Sequence[float]]  # [N][R], probability that each node is accepted, by rank
    exists: Sequence[Sequence[float]]  # [N][R], probability that a draft has the node

    @staticmethod
    def of(survivals: Sequence[Survival], caps: Sequence[int], missed: Sequence[float]) -> "LengthCandidates":
        """Returns candidates with these estimates."""
        accepted, exists = [of.accepted() for of in survivals], [of.exists() for of in survivals]
        return LengthCandidates(caps, missed, accepted, exists)

    def nodes(self) -> list[tuple[int, int]]:
        """Returns the owner and rank of every node, the likeliest first; a request's nodes are in their order."""
        chances: list[tuple[float, int, int]] = []
        for owner, (cap, accepted, exists) in enumerate(zip(self.caps, self.accepted, self.exists, strict=True)):
            ratios = [min(accepted[rank] / max(exists[rank], 1e-9), 1.0) for rank in range(min(cap, len(accepted)))]
            chances += [(-chance, owner, rank) for rank, chance in enumerate(accumulate(ratios, min))]
        return [(owner, rank) for _, owner, rank in sorted(chances)]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Draft lengths of candidates."""

    lengths: Sequence[int]  # number of nodes of each
    gains: Sequence[float]  # expected accepted tokens of each
    values: Sequence[float]  # these, less the price of their seconds at the speed of the step
    worst: float = 0.0  # seconds that the step loses if all nodes are rejected
    rate: float = 0.0  # expected tokens per second, of all requests of the step


class Worst:
    """Seconds that steps of ``batch`` requests lose if all draft tokens are rejected."""

    def __init__(self, costs: CostModel, batch: int) -> None:
        self._costs, self._batch = costs, batch
        self._plain, self._step = costs.plain_seconds(batch), costs.step_seconds(batch)

    def seconds(self, nodes: int, proposing: float) -> float:
        """Returns the loss with ``nodes`` nodes, whose drafting takes ``proposing`` seconds."""
        return proposing + max(0.0, self._step(self._batch + nodes) - self._plain)

    def trial(self, length: int, missed: float, allowed: float) -> int:
        """Returns the largest affordable length of one request's draft, at most ``length``."""
        for nodes in range(1, length + 1):
            if self.seconds(nodes, self._costs.drafting.between(nodes, 1) + missed) > allowed:
                return nodes - 1
        return length


def _best(
    candidates: LengthCandidates,
    nodes: Sequence[tuple[int, int]],
    batch: int,
    costs: CostModel,
    allowed: float,
    constant: bool,
) -> tuple[int, float, float, float, float]:
    """Returns the best number of nodes (0: none is affordable), accepted tokens, seconds, loss at worst, tokens/s."""
    plain, step, between = costs.plain_seconds(batch), costs.step_seconds(batch), costs.drafting.between
    horizon, best = costs.tuning.horizon_steps, (0, 0.0, 0.0, 0.0, -1.0)
    gain = rows = missed = drafting = 0.0
    deepest = requests = 0
    for number, (owner, rank) in enumerate(nodes, 1):
        gain += candidates.accepted[owner][rank]
        rows += candidates.exists[owner][rank]
        if rank == 0:
            requests += 1
            missed += candidates.missed[owner]
        if rank == 0 or rank >= deepest:
            deepest = max(deepest, rank + 1)
            drafting = between(deepest, requests)
        worst = drafting + missed + max(0.0, step(batch + number) - plain)
        if worst > allowed:
            break
        seconds = drafting + missed / horizon + step(batch + rows)
        rate = (batch + gain) / seconds if seconds else 0.0
        if constant or rate > best[-1]:
            best = number, gain, seconds, worst, rate
    return best


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
    nodes, plain = candidates.nodes(), costs.plain_seconds(batch)
    count, gain, seconds, worst, rate = _best(candidates, nodes, batch, costs, allowed, constant)
    none = [0.0] * len(candidates.caps)
    added = (seconds - plain) / plain if plain else 0.0  # in plain steps
    if not count or (not constant and gain < batch * (added + costs.tuning.margin_tokens)):
        return Allocation([0] * len(candidates.caps), none, none)
    lengths = [0] * len(candidates.caps)
    for owner, _ in nodes[:count]:
        lengths[owner] += 1
    if any(early) and not constant:
        lengths, worst = _lengthened(lengths, candidates, early, batch, costs, allowed, worst)
    drafting = max(1, sum(length > 0 for length in lengths))
    gain, price = gain / drafting, batch * added / drafting
    gains = [gain if length else 0.0 for length in lengths]
    return Allocation(lengths, gains, [gain - price if length else 0.0 for length in lengths], worst, rate)


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
    length, count, step = best.lengths[number], sum(other > 0 for other in best.lengths), costs.step_seconds(batch)
    total = [step(batch + count * depth) + costs.drafting.between(depth, count) for depth in range(length + 1)]
    further = list(accumulate(costs.tuning.prior_acceptance**depth for depth in range(length)))
    return [
        min(
            best.rate * (total[deeper] - total[depth]) / count / further[deeper - depth - 1]
            for deeper in range(depth + 1, length + 1)
        )
        for depth in range(length)
    ]


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
    longest, at_worst = max(candidates.caps[i] for i in ending), Worst(costs, batch)
    while longest >= max(lengths):
        longer = list(lengths)
        for i in ending:
            longer[i] = max(lengths[i], min(candidates.caps[i], longest))
        missed = sum(seconds for seconds, length in zip(candidates.missed, longer, strict=True) if length)
        drafting = costs.drafting.seconds(max(longer), sum(length > 0 for length in longer))
        loss = at_worst.seconds(sum(longer), drafting + missed)
        if loss <= allowed:
            return longer, loss
        longest //= 2
    return list(lengths), worst
