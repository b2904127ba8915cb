"""The acceptance model: how likely draft tokens are accepted, learned from the text that followed.

``Rates`` are of single nodes, by what is known of a node before it is verified; ``Survival`` is of drafts by
rank. Both decay, and start from what other requests of the same kind showed.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from foretoken.core.draft import Draft
from foretoken.costs.tuning import TUNING, Tuning

# Nodes share a rate within a bucket between two of these bounds:
_STREAKS = (1, 4, 12)  # tokens that the source had right just before
CLAIMS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # P(node | parent) by a model itself
_UNSCORED = 0.7  # claim of a draft without scores


class Rates:
    """P(node accepted | its parent accepted) by cell, from decayed counts.

    An unobserved cell has the rate of ``prior``, without one that of its group of cells, without one a given base.

    Args:
        prior: Rates to start from.
        strength: Nodes that a prior counts as.
        memory: Nodes of a cell that count.
    """

    def __init__(self, prior: "Rates | None" = None, strength: float = 4.0, memory: float = 400.0) -> None:
        self._prior, self._strength, self._memory = prior, strength, memory
        self._counts: dict[int, list[float]] = {}  # by cell: accepted, all

    def for_request(self) -> "Rates":
        """Returns the rates of one request, which start from these."""
        return Rates(self, strength=8.0, memory=48.0)

    def add(self, cell: int, accepted: bool, group: int | None = None) -> None:
        """Counts a node of ``cell``, here and in the prior."""
        rates: Rates | None = self
        while rates is not None:
            for key in (cell,) if group is None else (cell, group):
                counts = rates._counts.get(key)
                if counts is None:
                    counts = rates._counts[key] = [0.0, 0.0]
                if counts[1] >= rates._memory:
                    counts[0] *= 0.5
                    counts[1] *= 0.5
                counts[0] += accepted
                counts[1] += 1.0
            rates = rates._prior

    def of(self, cell: int, base: float, group: int | None = None) -> float:
        """Returns the rate of ``cell``, whose group is ``group``; ``base`` where nothing was observed."""
        if self._prior is not None:
            base = self._prior.of(cell, base, group)
        elif group is not None:
            base = self._mean(group, base)
        return self._mean(cell, base)

    def line(self, cell: int) -> tuple[float, float]:
        """Returns (a, b), so that ``of(cell, base)`` is a + b base."""
        a, b = self._prior.line(cell) if self._prior else (0.0, 1.0)
        if (counts := self._counts.get(cell)) is None:
            return a, b
        share = self._strength / (counts[1] + self._strength)
        return self._mean(cell, a), b * share

    def _mean(self, cell: int, base: float) -> float:
        counts = self._counts.get(cell)
        return base if counts is None else (counts[0] + self._strength * base) / (counts[1] + self._strength)


def claim_cell(claim: float) -> int:
    """Returns the cell of a node to which a model gives the probability ``claim``."""
    return bisect_right(CLAIMS, claim)


def claims(draft: Draft) -> list[float]:
    """Returns P(node accepted | its parent accepted) of every node by the draft's own scores."""
    if draft.scores is None:
        return [_UNSCORED] * len(draft)
    reach = [*map(math.exp, draft.scores), 1.0]  # the root's last, at -1
    return [min(1.0, reach[node] / max(reach[parent], 1e-30)) for node, parent in enumerate(draft.parents)]


@dataclass(eq=False, slots=True)
class PendingDraft:
    """A draft made when the text had ``start`` tokens, followed as far as the text agrees.

    A draft is compared with the text whether it was verified or not. A node counts only if its parent was accepted and
    the text beyond it is known, so that text that ends early (right censoring) causes no bias.
    """

    draft: Draft
    start: int
    cells: Sequence[int] = ()  # the cell of each node
    group: int | None = None  # their group of cells
    at: int = -1  # the deepest accepted node so far, -1 for the root
    depth: int = 0  # its depth, the number of accepted tokens so far

    def follow(self, tokens: Sequence[int], rates: Rates | None = None) -> bool:
        """Follows the text as it is now and updates ``rates``. Returns whether nothing is left to learn."""
        ids = self.draft.ids
        while below := self.draft.below(self.at):
            if self.start + self.depth >= len(tokens):
                return False
            token, match = tokens[self.start + self.depth], None
            for child in below:
                if accepted := ids[child] == token:
                    match = child
                if rates is not None:
                    rates.add(self.cells[child], accepted, self.group)
            if match is None:
                return True
            self.at, self.depth = match, self.depth + 1
        return True

    def missed(self, tokens: Sequence[int]) -> bool:
        """Returns whether the text left the draft before the draft's end. Valid after ``follow``."""
        return bool(self.draft.below(self.at)) and self.start + self.depth < len(tokens)


@dataclass(eq=False, slots=True)
class SourceRecord:
    """Acceptance of one source's drafts of fixed candidates in one request.

    A node's cell is that of its claim; of copied text also of the streak, which shows how far it can be trusted.
    """

    rates: Rates  # its acceptance rates
    copies: bool  # the source copies text
    streak: int = 0  # number of tokens that it had right just before
    open: list[PendingDraft] = field(default_factory=list)  # drafts whose text is not known to their end

    def add(self, draft: Draft, start: int) -> list[float]:
        """Records a draft behind ``start`` tokens. Returns P(node accepted | its parent accepted) of its nodes."""
        stated, group = claims(draft), None
        if self.copies:
            group = bisect_right(_STREAKS, self.streak)
            cells = [1000 + 100 * group + claim_cell(claim) for claim in stated]
        else:
            cells = [claim_cell(claim) for claim in stated]
        self.open.append(PendingDraft(draft, start, cells, group))
        return [self.rates.of(cell, claim, group) for cell, claim in zip(cells, stated, strict=True)]

    def settle(self, tokens: Sequence[int]) -> None:
        """Compares the open drafts with the text as it is now."""
        if not self.open:
            return
        newest = self.open[-1]
        self.open = [draft for draft in self.open if not draft.follow(tokens, self.rates)]
        self.streak = 0 if newest.depth == 0 or newest.missed(tokens) else self.streak + newest.depth


Estimate = tuple[list[float], list[float]]  # acceptance of each rank after the rank before, existence of each rank


class Survival:
    """P(the node of rank r is on the accepted path), r = 1, 2, ..., and P(the draft has such a node).

    Ranks order the nodes by the draft's scores, or by their own order where it has none; in a chain they are depths.
    A draft teaches every rank that was asked for, since a smaller draft would have been its best part. The estimated
    quantity is each rank's acceptance relative to the rank before, so ranks that were never tried follow from others.

    Args:
        max_rank: The highest rank.
        prior: Estimate to begin with.
        memory: Number of drafts that count, None for that of one request.
        tuning: Constants.
    """

    def __init__(
        self, max_rank: int, prior: "Survival | None" = None, memory: float | None = None, tuning: Tuning = TUNING
    ) -> None:
        self.max_rank, self._prior, self._tuning = max_rank, prior, tuning
        self._keep = 1.0 - 1.0 / (memory or tuning.request_drafts)
        # By rank: drafts that accepted it, that accepted the rank before, that had it, that were asked for it.
        self._sums = [[0.0] * max_rank for _ in range(4)]
        self._estimate: Estimate | None = None

    def observe(self, budget: int, draft: Draft, path: Sequence[int], verified: int | None = None) -> None:
        """Learns from a draft.

        Args:
            budget: Number of nodes that it might have had.
            draft: The draft.
            path: The nodes that agree with the text.
            verified: Number of nodes that were verified, None for all.
        """
        ranks, size = _accepted_ranks(draft, path), len(draft) if verified is None else verified
        survival: Survival | None = self
        while survival is not None:
            survival._add(min(budget, survival.max_rank), ranks, size)
            survival = survival._prior

    def discount(self, share: float) -> None:
        """Keeps ``share`` of the weight of what was learned here."""
        self._sums = [[share * total for total in sums] for sums in self._sums]
        self._estimate = None

    def accepted(self) -> list[float]:
        """Returns the acceptance probabilities [max_rank], which never rise."""
        return list(accumulate(self.estimate()[0], mul))

    def exists(self) -> list[float]:
        """Returns the probabilities [max_rank] that a draft has the rank, which never rise."""
        return self.estimate()[1]

    def estimate(self) -> Estimate:
        """Returns P(a rank is accepted | the rank before is) and P(the draft has the rank), [max_rank] each."""
        if self._estimate is None:
            self._estimate = _estimate(self._sums, *self._priors(), self._tuning.prior_drafts)
        return self._estimate

    def _add(self, budget: int, ranks: Sequence[int], size: int) -> None:
        self._estimate = None
        keep, (accepted, before, had, requested) = self._keep, self._sums
        for rank in range(budget):
            accepted[rank] *= keep
            before[rank] *= keep
            had[rank] = had[rank] * keep + (rank < size)
            requested[rank] = requested[rank] * keep + 1.0
        for rank in ranks:
            if rank < budget:
                accepted[rank] += 1.0
        for rank in (0, *(rank + 1 for rank in ranks)):  # of the first, the root is the rank before
            if rank < budget:
                before[rank] += 1.0

    def _priors(self) -> Estimate:
        """Returns the priors of the ratios and of the existence of ranks, [max_rank] each."""
        return (self._pooled(), [1.0] * self.max_rank) if self._prior is None else self._prior.estimate()

    def _pooled(self) -> list[float]:
        """Returns the prior of the ratios: the first rank's own, and a common one for all others."""
        base, strength = self._tuning.prior_acceptance, self._tuning.prior_drafts
        accepted, before = (sum(sums[1:]) for sums in self._sums[:2])
        common = (accepted + strength * base) / (before + strength)
        return [base, *[common] * (self.max_rank - 1)]


def _estimate(sums: Sequence[Sequence[float]], ratios: list[float], exists: list[float], strength: float) -> Estimate:
    """Returns the estimate of ``Survival.estimate``.

    Args:
        sums: [4][max_rank], see ``Survival``.
        ratios: [max_rank], prior of the first.
        exists: [max_rank], prior of the second.
        strength: Drafts that the priors count as.
    """
    accepted, before, had, requested = sums
    own = [
        min(1.0, (hits + strength * ratio) / (tries + strength))
        for hits, tries, ratio in zip(accepted, before, ratios, strict=True)
    ]
    there = [
        (some + strength * share) / (drafts + strength)
        for some, drafts, share in zip(had, requested, exists, strict=True)
    ]
    return own, list(accumulate(there, min))


def _accepted_ranks(draft: Draft, path: Sequence[int]) -> list[int]:
    """Returns the ranks, from 0, of the nodes on the accepted path."""
    if draft.scores is None or draft.is_chain:
        return list(path)
    scores = draft.scores
    ranks = {node: rank for rank, node in enumerate(sorted(range(len(scores)), key=lambda node: -scores[node]))}
    return [ranks[node] for node in path]
