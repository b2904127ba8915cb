"""What drafts would have saved: every guess is held against the text that came, whoever drafted it.

Nothing has to be run again. A guess is known to be right down to the first token that differs from the text, so all
guesses of a round are judged, used or not; what reaches beyond the text so far is judged when more of it is there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.core.draft import Draft

_PLACES = (1, 2, 3, 4, 6, 9, 16)  # nodes of a draft, in its own order, share a rate from one of these to the next
_STREAKS = (1, 4, 12)  # so do drafts by how many tokens their maker had right just before,
_SIZES = (3, 8)  # and by how many nodes it dares to draft
_RUNGS = (0.25, 0.75, 1.5, 3.0, 6.0)  # promised tokens from which another mean counts
_BASE = 0.7  # of whom nothing is known; too high costs a few rows, too low leaves good drafts out

Row = tuple[int, int]


class Rates:
    """P(a node stands | its parent stands) for one maker of drafts: by streak, size of the draft, and place in it.

    A conditional rate learns only where the parent stood and the text beyond is known, so text that ends early (right
    censoring) bends nothing. ``prior`` stands in where little was seen, with the weight of ``strength`` nodes; old
    observations fade once a cell holds ``memory`` of them.
    """

    def __init__(self, prior: Rates | None = None, strength: float = 4.0, memory: float = 400.0) -> None:
        self._prior, self._strength, self._memory = prior, strength, memory
        self._cells: dict[Row, list[list[float]]] = {}  # by place: hits, trials
        self._streaks: dict[int, list[float]] = {}

    def row(self, key: Row) -> list[float]:
        """The rate at each place, for drafts of one kind; at places not seen yet, that of all such drafts' nodes."""
        if self._prior:
            base = self._prior.row(key)
        else:
            base = [self._mean(self._streaks.get(key[0]), _BASE)] * (len(_PLACES) + 1)
        cells = self._cells.get(key)
        return base if cells is None else [self._mean(cell, rate) for cell, rate in zip(cells, base, strict=True)]

    def add(self, key: Row, place: int, stood: bool) -> None:
        cells = self._cells.setdefault(key, [[0.0, 0.0] for _ in range(len(_PLACES) + 1)])
        for cell in (cells[place], self._streaks.setdefault(key[0], [0.0, 0.0])):
            if cell[1] >= self._memory:
                cell[0] *= 0.5
                cell[1] *= 0.5
            cell[0] += stood
            cell[1] += 1.0
        if self._prior:
            self._prior.add(key, place, stood)

    def _mean(self, cell: list[float] | None, base: float) -> float:
        return base if cell is None else (cell[0] + self._strength * base) / (cell[1] + self._strength)

    def of(self, key: Row, draft: Draft) -> list[float]:
        """P(node stands | its parent stands) of every node."""
        rates = self.row(key)
        return [rates[bisect_right(_PLACES, node)] for node in range(len(draft))]


@dataclass(eq=False, slots=True)
class Guess:
    """A draft made when the text had ``start`` tokens, followed down as far as the text agrees."""

    draft: Draft
    start: int
    key: Row = (0, 0)
    at: int = -1
    depth: int = 0

    def follow(self, tokens: Sequence[int], rates: Rates | None = None) -> bool:
        """Go on with the text as it is now, and teach ``rates``. -> whether nothing is left to learn"""
        ids, children = self.draft.ids, self.draft.children
        while below := children[self.at + 1]:
            if self.start + self.depth >= len(tokens):
                return False
            token = tokens[self.start + self.depth]
            right = None
            for child in below:
                stood = ids[child] == token
                right = child if stood else right
                if rates is not None:
                    rates.add(self.key, bisect_right(_PLACES, child), stood)
            if right is None:
                return True
            self.at, self.depth = right, self.depth + 1
        return True

    def missed(self, tokens: Sequence[int]) -> bool:
        """Whether the text went where the draft did not, although it had more to say. After ``follow``."""
        return bool(self.draft.children[self.at + 1]) and self.start + self.depth < len(tokens)


@dataclass(eq=False, slots=True)
class Account:
    """One maker of drafts in one request: its rates, how many tokens it had right lately, and its open guesses."""

    rates: Rates
    streak: int = 0
    open: list[Guess] = field(default_factory=list)

    def guess(self, draft: Draft, start: int) -> list[float]:
        """Remember a draft. -> P(node stands | its parent stands) of its nodes"""
        key = (bisect_right(_STREAKS, self.streak), bisect_right(_SIZES, len(draft)))
        self.open.append(Guess(draft, start, key))
        return self.rates.of(key, draft)

    def settle(self, tokens: Sequence[int]) -> None:
        """The text went on."""
        left = [guess for guess in self.open if not guess.follow(tokens, self.rates)]
        if self.open:
            newest = self.open[-1]
            self.streak = 0 if newest.depth == 0 or newest.missed(tokens) else self.streak + newest.depth
        self.open = left


class Mean:
    """A mean that fades, begun from a prior's with the weight of ``strength`` observations."""

    def __init__(self, prior: Mean | None = None, strength: float = 4.0, memory: float = 64.0) -> None:
        self._prior, self._strength, self._memory = prior, strength, memory
        self._sum = self.count = 0.0

    def add(self, value: float) -> None:
        if self.count >= self._memory:
            self._sum *= 0.5
            self.count *= 0.5
        self._sum += value
        self.count += 1.0
        if self._prior:
            self._prior.add(value)

    @property
    def value(self) -> float:
        """0 of nothing."""
        if self._prior is None:
            return self._sum / self.count if self.count else 0.0
        return (self._sum + self._strength * self._prior.value) / (self.count + self._strength)


class Ladder:
    """Means by how much was promised, since what one brings depends on how well the others do at that moment.

    A rung begins from the same rung of ``prior``, or without one from the mean of all rungs.
    """

    def __init__(self, prior: Ladder | None = None, strength: float = 4.0, memory: float = 256.0) -> None:
        self.all: Mean = prior.all if prior else Mean(memory=memory)
        above: list[Mean] = prior.rungs if prior else [self.all] * (len(_RUNGS) + 1)
        self.rungs: list[Mean] = [Mean(rung, strength, memory) for rung in above]

    def at(self, promised: float) -> Mean:
        return self.rungs[bisect_right(_RUNGS, promised)]
