"""Acceptance rates of the nodes of a draft by rank, learned from every draft for all smaller sizes at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretoken.core.draft import Draft
from foretoken.core.verdict import Verdict
from foretoken.costs.curve import Array
from foretoken.costs.tuning import TUNING, Tuning


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
        first: Prior of the first rank without ``prior``; None is that of a model.
    """

    def __init__(
        self,
        max_rank: int,
        prior: Survival | None = None,
        memory: float | None = None,
        tuning: Tuning = TUNING,
        first: float | None = None,
    ) -> None:
        self.max_rank, self._prior, self._tuning = max_rank, prior, tuning
        self._first = tuning.first_rank if first is None else first
        self._keep = 1.0 - 1.0 / (memory or tuning.request_memory)
        # Drafts that accepted a rank, that accepted the rank before, that had the rank, that were asked for it.
        self._sums = np.zeros((4, max_rank))
        self._estimate: tuple[Array, Array] | None = None

    def observe(self, budget: int, draft: Draft, verdict: Verdict) -> None:
        """Learns from a draft of at most ``budget`` nodes and its verdict."""
        ranks, size = _accepted_ranks(draft, verdict), len(draft)
        survival: Survival | None = self
        while survival is not None:
            survival._add(min(budget, survival.max_rank), ranks, size)
            survival = survival._prior

    def discount(self, share: float) -> None:
        """Keeps ``share`` of the weight of what was learned here."""
        self._sums *= share
        self._estimate = None

    def accepted(self) -> Array:
        """Returns the acceptance probabilities [max_rank], which never rise."""
        return acceptance([self])[0][0]

    def exists(self) -> Array:
        """Returns the probabilities [max_rank] that a draft has the rank, which never rise."""
        return acceptance([self])[1][0]

    def _add(self, budget: int, ranks: Sequence[int], size: int) -> None:
        self._estimate = None
        sums = self._sums[:, :budget]
        sums *= self._keep
        sums[1, :1] += 1.0
        sums[2, :size] += 1.0
        sums[3] += 1.0
        for rank in ranks:
            if rank < budget:
                sums[0, rank] += 1.0
                sums[1, rank + 1 : rank + 2] += 1.0

    def _priors(self) -> tuple[Array, Array]:
        """Returns the priors of the ratios and of the existence of ranks, [max_rank] each."""
        if self._prior is None:
            return self._pooled(), np.ones(self.max_rank)
        if self._prior._estimate is None:  # kept, because many requests share it
            self._prior._estimate = _estimate(self._prior._sums, *self._prior._priors(), self._tuning.strength)
        return self._prior._estimate

    def _pooled(self) -> Array:
        """Returns the prior of the ratios: the first rank's own, and a common one for all others."""
        tuning = self._tuning
        ratios = np.full(self.max_rank, self._first)
        accepted, before = self._sums[:2, 1:].sum(1)
        ratios[1:] = (accepted + tuning.pool * tuning.next_rank) / (before + tuning.pool)
        return ratios


def acceptance(survivals: Sequence[Survival]) -> tuple[Array, Array]:
    """Returns ``accepted`` and ``exists`` of estimates with the same highest rank and tuning, [N, max_rank] each."""
    priors = [survival._priors() for survival in survivals]
    sums = np.stack([survival._sums for survival in survivals], axis=1)
    ratios, exists = (np.stack([prior[i] for prior in priors]) for i in (0, 1))
    ratios, exists = _estimate(sums, ratios, exists, survivals[0]._tuning.strength)
    return np.multiply.accumulate(ratios, axis=-1), exists


def _estimate(sums: Array, ratios: Array, exists: Array, strength: float) -> tuple[Array, Array]:
    """Returns P(a rank is accepted | the rank before is) and P(the draft has the rank), [..., max_rank] each.

    Args:
        sums: [4, ..., max_rank], see ``Survival``.
        ratios: [..., max_rank], prior of the first.
        exists: [..., max_rank], prior of the second.
        strength: Drafts that the priors count as.
    """
    accepted, before, had, requested = sums
    ratios = np.minimum(1.0, (accepted + strength * ratios) / (before + strength))
    return ratios, np.minimum.accumulate((had + strength * exists) / (requested + strength), axis=-1)


def _accepted_ranks(draft: Draft, verdict: Verdict) -> list[int]:
    """Returns the ranks, from 0, of the nodes on the accepted path."""
    if draft.scores is None or draft.is_chain:
        return list(verdict.path)
    order = np.argsort(-draft.scores.detach().cpu().double().numpy(), kind="stable")
    ranks = {int(node): rank for rank, node in enumerate(order)}
    return [ranks[node] for node in verdict.path]
