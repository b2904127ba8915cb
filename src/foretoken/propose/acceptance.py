"""Acceptance rates learned online: every draft is compared with the text that followed, used or not.

Nothing is computed again. A draft is known to be right down to its first token that differs from the text, so all
drafts of a step are scored. What extends beyond the current text is scored when more of it is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.core.draft import Draft

# Observations share a rate within a bucket between two of these bounds:
_PLACES = (1, 2, 3, 4, 6, 9, 16)  # index of the node in its draft
_STREAKS = (1, 4, 12)  # tokens that the proposer had right just before
_SIZES = (3, 8)  # nodes of the draft
_BUCKETS = (0.25, 0.75, 1.5, 3.0, 6.0)  # promised tokens
_BASE = 0.7  # rate before any observation; too high costs a few rows, too low leaves good drafts out

DraftKind = tuple[int, int]  # buckets of streak and size


class NodeRates:
    """P(node accepted | its parent accepted) for one proposer, by streak, draft size, and index in the draft.

    A conditional rate is updated only if the parent was accepted and the text beyond it is known, so text that ends
    early (right censoring) causes no bias. Old observations decay once a cell holds ``memory`` of them.

    Args:
        prior: Rates to start from, with the weight of ``strength`` nodes.
    """

    def __init__(self, prior: NodeRates | None = None, strength: float = 4.0, memory: float = 400.0) -> None:
        self._prior, self._strength, self._memory = prior, strength, memory
        self._cells: dict[DraftKind, list[list[float]]] = {}  # by place: hits, trials
        self._streaks: dict[int, list[float]] = {}

    def row(self, key: DraftKind) -> list[float]:
        """Returns the rate at each index for drafts of one kind; where unobserved, that of the same streak."""
        if self._prior:
            base = self._prior.row(key)
        else:
            base = [self._mean(self._streaks.get(key[0]), _BASE)] * (len(_PLACES) + 1)
        cells = self._cells.get(key)
        return base if cells is None else [self._mean(cell, rate) for cell, rate in zip(cells, base, strict=True)]

    def add(self, key: DraftKind, place: int, accepted: bool) -> None:
        """Counts one node."""
        cells = self._cells.setdefault(key, [[0.0, 0.0] for _ in range(len(_PLACES) + 1)])
        for cell in (cells[place], self._streaks.setdefault(key[0], [0.0, 0.0])):
            if cell[1] >= self._memory:
                cell[0] *= 0.5
                cell[1] *= 0.5
            cell[0] += accepted
            cell[1] += 1.0
        if self._prior:
            self._prior.add(key, place, accepted)

    def _mean(self, cell: list[float] | None, base: float) -> float:
        return base if cell is None else (cell[0] + self._strength * base) / (cell[1] + self._strength)

    def of(self, key: DraftKind, draft: Draft) -> list[float]:
        """Returns P(node accepted | its parent accepted) of every node."""
        rates = self.row(key)
        return [rates[bisect_right(_PLACES, node)] for node in range(len(draft))]


@dataclass(eq=False, slots=True)
class PendingDraft:
    """A draft made when the text had ``start`` tokens, followed as far as the text agrees.

    Attributes:
        key: The kind of the draft, for ``NodeRates``.
        at: The deepest accepted node so far, -1 for the root.
        depth: Its depth, the number of accepted tokens so far.
    """

    draft: Draft
    start: int
    key: DraftKind = (0, 0)
    at: int = -1
    depth: int = 0

    def follow(self, tokens: Sequence[int], rates: NodeRates | None = None) -> bool:
        """Follows the text as it is now and updates ``rates``. Returns whether nothing is left to learn."""
        ids, children = self.draft.ids, self.draft.children
        while below := children[self.at + 1]:
            if self.start + self.depth >= len(tokens):
                return False
            token = tokens[self.start + self.depth]
            match = None
            for child in below:
                accepted = ids[child] == token
                match = child if accepted else match
                if rates is not None:
                    rates.add(self.key, bisect_right(_PLACES, child), accepted)
            if match is None:
                return True
            self.at, self.depth = match, self.depth + 1
        return True

    def missed(self, tokens: Sequence[int]) -> bool:
        """Returns whether the text left the draft before the draft's end. Valid after ``follow``."""
        return bool(self.draft.children[self.at + 1]) and self.start + self.depth < len(tokens)


@dataclass(eq=False, slots=True)
class MemberRecord:
    """State of one proposer in one request.

    Attributes:
        rates: Its acceptance rates.
        streak: Number of tokens that it had right just before.
        open: Its drafts that are not fully scored.
    """

    rates: NodeRates
    streak: int = 0
    open: list[PendingDraft] = field(default_factory=list)

    def add(self, draft: Draft, start: int) -> list[float]:
        """Records a draft. Returns P(node accepted | its parent accepted) of its nodes."""
        key = (bisect_right(_STREAKS, self.streak), bisect_right(_SIZES, len(draft)))
        self.open.append(PendingDraft(draft, start, key))
        return self.rates.of(key, draft)

    def settle(self, tokens: Sequence[int]) -> None:
        """Scores the open drafts after new text."""
        still_open = [draft for draft in self.open if not draft.follow(tokens, self.rates)]
        if self.open:
            newest = self.open[-1]
            self.streak = 0 if newest.depth == 0 or newest.missed(tokens) else self.streak + newest.depth
        self.open = still_open


class DecayingMean:
    """A decaying mean that starts from a prior's with the weight of ``strength`` observations."""

    def __init__(self, prior: DecayingMean | None = None, strength: float = 4.0, memory: float = 64.0) -> None:
        self._prior, self._strength, self._memory = prior, strength, memory
        self._sum = self.count = 0.0

    def add(self, value: float) -> None:
        """Adds an observation, also to the prior."""
        if self.count >= self._memory:
            self._sum *= 0.5
            self.count *= 0.5
        self._sum += value
        self.count += 1.0
        if self._prior:
            self._prior.add(value)

    @property
    def value(self) -> float:
        """The mean, 0 without observations or prior."""
        if self._prior is None:
            return self._sum / self.count if self.count else 0.0
        return (self._sum + self._strength * self._prior.value) / (self.count + self._strength)


class BucketedMeans:
    """Means by the number of promised tokens, since a proposer's gain depends on how well the others do at that moment.

    A bucket starts from the same bucket of ``prior``, or without one from the mean of all buckets.
    """

    def __init__(self, prior: BucketedMeans | None = None, strength: float = 4.0, memory: float = 256.0) -> None:
        self.all: DecayingMean = prior.all if prior else DecayingMean(memory=memory)
        above: list[DecayingMean] = prior.buckets if prior else [self.all] * (len(_BUCKETS) + 1)
        self.buckets: list[DecayingMean] = [DecayingMean(bucket, strength, memory) for bucket in above]

    def at(self, promised: float) -> DecayingMean:
        """Returns the mean of the bucket of ``promised`` tokens."""
        return self.buckets[bisect_right(_BUCKETS, promised)]
