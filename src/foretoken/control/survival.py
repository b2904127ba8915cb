"""How likely the nodes of a draft are to stand: learned from every draft, for all sizes up to its own at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretoken.control.curve import Array
from foretoken.core.draft import Draft
from foretoken.core.verdict import Verdict

_FIRST, _NEXT = 0.6, 0.75  # of whom nothing is known: P(rank 1 stands), and each rank's share of the one before
_POOL = 2.0  # weight, in drafts, of what all ranks show where one rank shows nothing


class Survival:
    """P(the draft's node of rank r lies on the accepted path), r = 1, 2, ..., and P(the draft has such a node).

    Ranks order nodes by the draft's scores, or by their own order where it has none; of a chain they are the depths.
    A draft teaches all ranks that were asked for: a smaller one would have been its best part. What is estimated is
    each rank's share of the rank before, so ranks that were never tried follow from those that were.
    """

    def __init__(self, most: int, prior: Survival | None = None, strength: float = 4.0, memory: float = 48.0) -> None:
        """most: the highest rank. prior: where to begin, with the weight of ``strength`` drafts. memory: in drafts."""
        self.most, self._prior, self._strength, self._keep = most, prior, strength, 1.0 - 1.0 / memory
        # Drafts in which a rank stood, in which the rank before stood, which had the rank, which were asked for it.
        self._sums = np.zeros((4, most))

    def observe(self, asked: int, draft: Draft, verdict: Verdict) -> None:
        """A draft for which ``asked`` nodes were granted, and what became of it."""
        ranks, size = _ranks(draft, verdict), len(draft)
        survival: Survival | None = self
        while survival is not None:
            survival._add(min(asked, survival.most), ranks, size)
            survival = survival._prior

    def doubt(self, share: float) -> None:
        """Keep so much of what was learned here: things have changed."""
        self._sums *= share

    def stands(self) -> Array:
        """[most], never rising."""
        found: Array = np.multiply.accumulate(self._shares())
        return found

    def exists(self) -> Array:
        """[most], never rising."""
        prior = self._prior.exists() if self._prior else 1.0
        _, _, there, asked = self._sums
        found: Array = np.minimum.accumulate((there + self._strength * prior) / (asked + self._strength))
        return found

    def _add(self, asked: int, ranks: Sequence[int], size: int) -> None:
        sums = self._sums[:, :asked]
        sums *= self._keep
        sums[1, :1] += 1.0
        sums[2, :size] += 1.0
        sums[3] += 1.0
        for rank in ranks:
            if rank < asked:
                sums[0, rank] += 1.0
                sums[1, rank + 1 : rank + 2] += 1.0

    def _shares(self) -> Array:
        prior = self._prior._shares() if self._prior else self._pooled()
        found: Array = np.minimum(1.0, (self._sums[0] + self._strength * prior) / (self._sums[1] + self._strength))
        return found

    def _pooled(self) -> Array:
        """The first rank by itself, and one share for all others."""
        shares = np.full(self.most, _FIRST)
        stood, before = self._sums[:2, 1:].sum(1)
        shares[1:] = (stood + _POOL * _NEXT) / (before + _POOL)
        return shares


def _ranks(draft: Draft, verdict: Verdict) -> list[int]:
    """The ranks, from 0, of the nodes on the accepted path."""
    if draft.scores is None or draft.is_chain:
        return list(verdict.path)
    order = np.argsort(-draft.scores.detach().cpu().double().numpy(), kind="stable")
    places = {int(node): rank for rank, node in enumerate(order)}
    return [places[node] for node in verdict.path]
