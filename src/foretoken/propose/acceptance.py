"""Acceptance rates learned online: every draft is compared with the text that followed, used or not.

Nothing is computed again. A draft is known to be right down to its first token that differs from the text, so all
drafts of a step are scored. What extends beyond the current text is scored when more of it is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from foretoken.core.draft import Draft
from foretoken.models.chains import ChainEnd

# Observations share a rate within a bucket between two of these bounds:
_PLACES = (1, 2, 3, 4, 6, 9, 16)  # index of the node in its draft
_STREAKS = (1, 4, 12)  # tokens that the proposer had right just before
_SIZES = (3, 8)  # nodes of the draft
_FIRST_STEPS = 8  # steps after which their tokens per second are taken to be usual
_BUCKETS = (0.25, 0.75, 1.5, 3.0, 6.0)  # promised tokens
_CLAIMS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # P(node | parent) by a model itself
_BASE = 0.7  # claim of a draft without scores
_TRUST = 0.5  # of the claims of copied text before any observation: all drafts are scored, so good ones show soon

DraftKind = tuple[int, int]  # buckets of streak and size


class NodeRates:
    """P(node accepted | its parent accepted) for one proposer, by streak, draft size, and index in the draft (place).

    A conditional rate is updated only if the parent was accepted and the text beyond it is known, so text that ends
    early (right censoring) causes no bias. Old observations decay once a cell holds ``memory`` of them. What was not
    observed starts from the rate of the same streak, and that from the claims of the draft's own scores.

    Args:
        prior: Rates to start from, with the weight of ``strength`` nodes.
    """

    def __init__(self, prior: NodeRates | None = None, strength: float = 4.0, memory: float = 400.0) -> None:
        self._prior, self._strength, self._memory = prior, strength, memory
        self._cells: dict[DraftKind, dict[int, list[float]]] = {}  # by place: hits, trials
        self._streaks: dict[int, list[float]] = {}

    def for_request(self) -> Self:
        """Returns the rates of one request, which start from these."""
        return type(self)(self, strength=16.0, memory=48.0)

    def kind(self, streak: int, draft: Draft) -> DraftKind:
        """Returns the kind of a draft from a proposer that had ``streak`` tokens right before it."""
        return bisect_right(_STREAKS, streak), bisect_right(_SIZES, len(draft))

    def places(self, draft: Draft) -> list[int]:
        """Returns the place of each node among the rates of a kind."""
        return [bisect_right(_PLACES, node) for node in range(len(draft))]

    def add(self, key: DraftKind, place: int, accepted: bool) -> None:
        """Counts one node."""
        cells = self._cells.setdefault(key, {})
        for cell in (cells.setdefault(place, [0.0, 0.0]), self._streaks.setdefault(key[0], [0.0, 0.0])):
            if cell[1] >= self._memory:
                cell[0] *= 0.5
                cell[1] *= 0.5
            cell[0] += accepted
            cell[1] += 1.0
        if self._prior:
            self._prior.add(key, place, accepted)

    def bases(self, key: DraftKind, draft: Draft) -> list[float]:
        """Returns the rates of nodes at places where nothing was observed."""
        return [self._mean(self._streaks.get(key[0]), _TRUST * claim) for claim in claims(draft)]

    def of(self, key: DraftKind, draft: Draft) -> list[float]:
        """Returns P(node accepted | its parent accepted) of every node."""
        rates = self._prior.of(key, draft) if self._prior else self.bases(key, draft)
        cells = self._cells.get(key, {})
        return [self._mean(cells.get(place), rate) for place, rate in zip(self.places(draft), rates, strict=True)]

    def _mean(self, cell: list[float] | None, base: float) -> float:
        return base if cell is None else (cell[0] + self._strength * base) / (cell[1] + self._strength)


class ScoredRates(NodeRates):
    """P(node accepted | its parent accepted) of a model's drafts, by what the model itself takes it to be.

    Without scores every node claims the same, and the streak tells more.
    """

    def kind(self, streak: int, draft: Draft) -> DraftKind:
        return (bisect_right(_STREAKS, streak), 1) if draft.scores is None else (0, 0)

    def places(self, draft: Draft) -> list[int]:
        return [bisect_right(_CLAIMS, claim) for claim in claims(draft)]

    def bases(self, key: DraftKind, draft: Draft) -> list[float]:
        return claims(draft)

    def chance(self, claim: float) -> float:
        """Returns P(node accepted | its parent accepted) of one node that the model takes to be ``claim``."""
        rate = self._prior.chance(claim) if isinstance(self._prior, ScoredRates) else claim
        return self._mean(self._cells.get((0, 0), {}).get(bisect_right(_CLAIMS, claim)), rate)

    def end(self, floors: Sequence[float]) -> ChainEnd:
        """Returns where a chain ends whose tokens are accepted at these rates: see ``ChainEnd``."""
        lines = [self._line(bucket) for bucket in range(len(_CLAIMS) + 1)]
        return ChainEnd(_CLAIMS, [base for base, _ in lines], [slope for _, slope in lines], floors)

    def _line(self, bucket: int) -> tuple[float, float]:
        """Returns the rate of a claim in this bucket as a number, and another that the claim is multiplied with."""
        base, slope = self._prior._line(bucket) if isinstance(self._prior, ScoredRates) else (0.0, 1.0)
        cell = self._cells.get((0, 0), {}).get(bucket)
        if cell is None:
            return base, slope
        return self._mean(cell, base), slope * self._strength / (cell[1] + self._strength)

    def learn(self, claim: float, accepted: bool) -> None:
        """Counts one node that the model took to be ``claim``."""
        self.add((0, 0), bisect_right(_CLAIMS, claim), accepted)


def claims(draft: Draft) -> list[float]:
    """Returns P(node accepted | its parent accepted) of every node, as the draft's own scores have it."""
    if draft.scores is None:
        return [_BASE] * len(draft)
    reach = [*draft.scores.double().exp().tolist(), 1.0]  # the root's last, at -1
    return [min(1.0, reach[node] / max(reach[parent], 1e-30)) for node, parent in enumerate(draft.parents)]


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
        places = rates.places(self.draft) if rates is not None and len(self.draft) else ()
        while below := children[self.at + 1]:
            if self.start + self.depth >= len(tokens):
                return False
            token = tokens[self.start + self.depth]
            match = None
            for child in below:
                accepted = ids[child] == token
                match = child if accepted else match
                if rates is not None:
                    rates.add(self.key, places[child], accepted)
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
        key = self.rates.kind(self.streak, draft)
        self.open.append(PendingDraft(draft, start, key))
        return self.rates.of(key, draft) if len(draft) else []

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


class UsualRate:
    """Tokens per second over the latest steps, of all of which the last ``memory`` count."""

    def __init__(self, memory: float = 256.0) -> None:
        self._memory = memory
        self._tokens = self._seconds = self._steps = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Adds a step."""
        if self._steps >= self._memory:
            self._tokens, self._seconds, self._steps = self._tokens / 2, self._seconds / 2, self._steps / 2
        self._tokens += tokens
        self._seconds += seconds
        self._steps += 1.0

    @property
    def rate(self) -> float:
        """The rate, 0 before enough steps."""
        return self._tokens / self._seconds if self._steps >= _FIRST_STEPS and self._seconds else 0.0


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
