"""What rounds take, learned from the rounds themselves: plain ones, passes by rows, drafting, and catching up.

Rounds that bring in a prompt teach nothing about passes. A proposer that sat out computes what it missed when it next
drafts; those seconds are told apart, as seconds a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.control.curve import Array, Curve
from foretoken.control.passes import Passes
from foretoken.core.context import Context
from foretoken.core.step import StepOutput, Timings, is_decode_only

_BEHIND = 8  # missed tokens of all sequences together that go unnoticed
_REHEARSED = 0.5  # observations that what was measured on a made-up prompt counts for,
_COMPARED = 2.0  # and what passes over more rows take beside those over fewer: it was measured in one moment
_EARLY = 1.5  # observations that make the time of a plain round known
_REFRESH = 4  # drafting rounds, at least, before a plain one is timed again: it costs nothing while nothing is gained;
_STALE = 3.0  # observations that what was known then counts for
_PATIENCE = 200.0  # and so many more for every whole time that drafting is faster, which costs half a percent
_TOGETHER = 16.0  # missed tokens that take as long as one step of drafting, until measured


@dataclass(frozen=True, slots=True)
class Plan:
    """What a round was granted. lengths: tokens before it. behind: those of them that the proposer did not see."""

    budgets: dict[int, int]
    lengths: dict[int, int]
    behind: int


class Tempo:
    """Shared by the controllers of an engine; each of them may report a round."""

    def __init__(self, passes: Passes | None = None) -> None:
        """passes: where others learn from the same ones."""
        self.passes, self.plain = passes or Passes(), Curve()
        self._drafts: dict[int, Curve] = {}  # by the bit length of how many sequences draft; over the depth
        self._missed = [0.0, 0.0]  # seconds of catching up, tokens
        self._read: dict[int, int] = {}
        self._plan = Plan({}, {}, 0)
        self._seen: Timings | None = None
        self._since = 0
        self._speedup = 1.0

    @property
    def ready(self) -> bool:
        """Whether it is known what drafting takes."""
        return bool(self._drafts)

    def due(self, batch: int) -> bool:
        """Whether a plain round should be timed before others draft."""
        slack = batch // 8
        if self.plain.known(batch, slack) < (1.0 if self.plain.weight > _EARLY else _EARLY):
            return True
        return self._since >= _REFRESH + _PATIENCE * max(0.0, self._speedup - 1.0)

    def plain_seconds(self, batch: int) -> float:
        """A round of ``batch`` sequences without drafts, at the machine's speed now; 0 until one was seen."""
        return self.passes.level * self.plain.at(batch)

    def share(self, rows: int, of: int) -> float:
        """A pass over ``rows`` rows in parts of one over ``of``, which are more, as if they ran beside each other."""
        return 1.0 / float(self.passes.beside(np.asarray([of]), rows)[0])

    def pass_seconds(self, batch: int, rows: int) -> float:
        """A pass over ``rows`` rows where a plain round has ``batch``, which are less."""
        return float(self.pass_table(batch, np.asarray([rows]))[0])

    def pass_table(self, batch: int, rows: Array, *, at_best: bool = False) -> Array:
        """``pass_seconds`` for each of ``rows``, whole or not; ``at_best`` as in ``Passes.beside``.

        Passes and plain rounds are timed at different moments, and a machine that has become faster in between is no
        reason to think that rows cost nothing, nor one that has become slower that they cost much. So a pass takes as
        much more than a plain round as it would beside one, and never less.
        """
        plain = self.plain_seconds(batch)
        return plain * self.passes.beside(rows, batch, at_best=at_best) if plain else self.passes.over(rows)

    def draft_seconds(self, depth: int, count: int) -> float:
        """Drafting ``depth`` nodes for each of ``count`` sequences that missed nothing."""
        if not self._drafts:
            return 0.0
        return self._drafts[self._nearest(count.bit_length())].at(depth)

    def draft_table(self, depths: Array, counts: Array) -> Array:
        """Seconds for each pair of depth and number of sequences."""
        if not self._drafts:
            return np.zeros(len(depths))
        most = int(np.max(counts, initial=1)).bit_length()
        nearest = [self._nearest(bits) for bits in range(most + 1)]
        if len(set(nearest)) == 1:
            return self._drafts[nearest[0]].over(depths)
        found = np.zeros(len(depths))
        bits = np.frexp(counts)[1]  # the bit length of each
        for known in set(nearest):
            mine = np.isin(bits, [b for b, other in enumerate(nearest) if other == known])
            found[mine] = self._drafts[known].over(depths[mine])
        return found

    def behind(self, context: Context) -> int:
        """Tokens that the proposer would have to read first."""
        return len(context.tokens) - self._read.get(context.id, 0)

    def missed_seconds(self, tokens: float) -> float:
        """Reading ``tokens`` that were missed."""
        seconds, count = self._missed
        return tokens * seconds / count if count else 0.0

    def planned_seconds(self) -> float:
        """Drafting in the round at hand, catching up included."""
        drafting = [budget for budget in self._plan.budgets.values() if budget > 0]
        steps = self.draft_seconds(max(drafting), len(drafting)) if drafting else 0.0
        return steps + self.missed_seconds(self._plan.behind)

    def begin(self, contexts: Sequence[Context], budgets: Sequence[int]) -> None:
        """What the round at hand was granted; the last word before it counts."""
        behind = sum(self.behind(c) for c, budget in zip(contexts, budgets, strict=True) if budget > 0)
        granted = {c.id: budget for c, budget in zip(contexts, budgets, strict=True)}
        self._plan = Plan(granted, {c.id: len(c.tokens) for c in contexts}, behind)

    def observe(self, steps: Sequence[StepOutput]) -> None:
        """A round; told of it twice it learns once."""
        if not steps or steps[0].timings is self._seen:
            return
        timings = self._seen = steps[0].timings
        granted = [self._plan.budgets.get(step.sequence, 0) for step in steps]
        drafting = [budget for budget in granted if budget > 0]
        self.passes.observe(steps)
        if is_decode_only(steps):
            rows = sum(len(step.draft) + 1 for step in steps)
            self._since += 1
            if rows == len(steps) and not drafting:
                if self._since >= _REFRESH:  # the machine may be another by now
                    self.plain.doubt(_STALE)
                self.plain.add(len(steps), timings.total / self.passes.level)
                self._since = 0
        for step, budget in zip(steps, granted, strict=True):
            if budget > 0 and (step.position > 0 or len(step.draft)):
                length = self._plan.lengths[step.sequence]
                self._read[step.sequence] = length + len(step.tokens)
        if drafting and any(len(step.draft) for step in steps):
            self._learn(max(drafting), len(drafting), timings.propose)
            self._faster(steps, timings.total)

    def forget(self, context: Context) -> None:
        """The sequence is over."""
        self._read.pop(context.id, None)

    def rehearsed(self, passes: Mapping[int, float], drafts: Mapping[int, float]) -> None:
        """The rounds so far were on a made-up prompt, and these are their medians.

        Seconds of a pass by rows, and of one sequence's drafts by depth.
        """
        self.passes.put(passes)
        for depth, seconds in drafts.items():
            self._drafts.setdefault(1, Curve(origin=True)).put(depth, seconds)
        self.doubt()

    def doubt(self) -> None:
        """What was measured so far stands in only until there is better."""
        self.passes.doubt(_COMPARED)
        for curve in self._drafts.values():
            curve.doubt(_REHEARSED)
        self.plain.doubt(_REHEARSED / 4)  # which the first rounds show anyway, and on which everything rests
        self._missed = [value / max(1.0, self._missed[1] / 64.0) for value in self._missed]
        self._since, self._read = 0, {}

    def _nearest(self, bits: int) -> int:
        """Where nothing is known of so many sequences, the number that comes closest."""
        return bits if bits in self._drafts else min(self._drafts, key=lambda known: abs(known - bits))

    def _learn(self, depth: int, count: int, seconds: float) -> None:
        """Drafting took ``seconds``: steps, and what was missed before them."""
        missed = self._plan.behind
        if missed <= _BEHIND:
            self._drafts.setdefault(count.bit_length(), Curve(origin=True)).add(depth, seconds)
            return
        if self._drafts:
            excess = max(0.0, seconds - self.draft_seconds(depth, count))
        else:  # nothing to tell them apart with
            step = seconds / (depth + missed / _TOGETHER)
            self._drafts[count.bit_length()] = Curve(origin=True)
            self._drafts[count.bit_length()].add(depth, step * depth)
            excess = step * missed / _TOGETHER
        self._missed = [0.8 * self._missed[0] + excess, 0.8 * self._missed[1] + missed]

    def _faster(self, steps: Sequence[StepOutput], seconds: float) -> None:
        plain = self.plain_seconds(len(steps))
        if plain and seconds and is_decode_only(steps):  # no round with drafts is shorter than one without
            speedup = sum(len(step.tokens) for step in steps) / len(steps) * min(1.0, plain / seconds)
            self._speedup += 0.1 * (speedup - self._speedup)
