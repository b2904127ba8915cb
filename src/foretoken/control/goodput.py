"""As much drafting as pays: for every round, the nodes that make expected tokens over measured time greatest.

Of all pairs of a request and a rank the likeliest come first; how many of them is decided by trying every number, none
included (algorithms.md, 3). Decided from earlier rounds alone, before anything is drawn. Where drafting does not pay it
is tried again after a while, with waits that double; where even four guesses out of five right would not pay, not at
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.control.base import Controller
from foretoken.control.survival import Survival
from foretoken.control.tempo import Tempo
from foretoken.core.context import Context
from foretoken.core.step import StepOutput

_MARGIN = 1.02  # by so much drafting has to be faster,
_CAUTION = 1.25  # and in the time that it adds bring so many tokens for each that plain decoding would: of many
# estimates the best one flatters, and the more time is at stake, the more an error of a few percent loses
_WAIT, _LONGEST = 8, 256  # rounds without a draft before the next try
_TRIAL = 4  # nodes of a try
_HOPE = 0.8 ** np.arange(1.0, 65.0)  # what a try could show
_SURPRISED = 0.25  # what is left of earlier evidence when a try lands
_HORIZON = 64  # tokens over which catching up has to pay
_HOLD = 4  # rounds that a decision stands while the same requests run;
_HOLD_NONE = 64  # one to draft nothing, from which nothing is learned
_PROMPT = 0.25  # of a plain round: what drafting may take before a request's first token


@dataclass(eq=False, slots=True)
class Record:
    """One request. idle: rounds since it drafted, tried again after ``wait``. trial: its draft at hand is a try."""

    survival: Survival
    wait: int
    idle: int = 0
    asked: int = 0
    trial: bool = False


@dataclass(eq=False, slots=True)
class Decision:
    """Nodes for each place in the batch, decided for these requests and limits. age: rounds that it has stood."""

    who: list[int]
    forced: int
    limits: dict[int, int]
    nodes: dict[int, int]
    age: int = 0

    def stands(self, who: list[int], forced: int, limits: dict[int, int]) -> bool:
        """As long as there is room for it, and no more than there was."""
        return (
            self.age < (_HOLD if self.nodes else _HOLD_NONE)
            and (self.who, self.forced) == (who, forced)
            and self.limits.keys() == limits.keys()
            and all(self.nodes.get(i, 0) <= limit <= self.limits[i] for i, limit in limits.items())
        )


class Goodput(Controller):
    """At most ``most`` nodes for each sequence. A request that names its own depth has it."""

    def __init__(self, most: int, tempo: Tempo) -> None:
        self.most, self.tempo = most, tempo
        self._records: dict[int, Record] = {}
        self._priors: dict[tuple[bool, str | None, bool], Survival] = {}
        self._wait = _WAIT
        self._held: Decision | None = None
        self._resting: tuple[list[Record], list[Record]] = ([], [])  # where nobody drafts: all, and those who could

    def budgets(self, contexts: Sequence[Context], rooms: Sequence[int]) -> list[int]:
        budgets = [0 if c.depth is None else max(0, min(c.depth, r)) for c, r in zip(contexts, rooms, strict=True)]
        own, self._resting = [i for i, context in enumerate(contexts) if context.depth is None], ([], [])
        records = {i: self._record(contexts[i]) for i in own}
        for record in records.values():
            record.asked, record.trial = 0, False
        if own and self.most and not self.tempo.due(len(contexts)):
            limits = {i: min(self.most, rooms[i]) for i in own if rooms[i] > 0}
            limits = {i: most for i, most in limits.items() if self._welcome(contexts[i], most, len(contexts))}
            for i, nodes in self._decided(contexts, limits, sum(budgets)).items():
                budgets[i] = records[i].asked = nodes
            tried = self._try(contexts, {i: limits[i] for i in limits if not budgets[i]}, sum(budgets))
            if tried is not None:
                budgets[tried] = records[tried].asked = min(_TRIAL, limits[tried])
                records[tried].trial = True
            if not any(budgets) and all(context.generated for context in contexts):
                self._resting = list(records.values()), [records[i] for i in limits]
        self.tempo.begin(contexts, budgets)
        return budgets

    def observe(self, steps: Sequence[StepOutput]) -> None:
        self.tempo.observe(steps)
        for step in steps:
            record = self._records.get(step.sequence)
            if record is not None and step.position > 0:
                self._settle(record, step)

    def rest(self) -> int:
        """Until a decision is due again, or a try."""
        everyone, able = self._resting
        if not everyone or not self.tempo.ready:
            return 0
        age = self._held.age if self._held else 0
        return min([_HOLD_NONE - age, *(r.wait - r.idle for r in able)]) if able else _HOLD_NONE

    def rested(self, rounds: int) -> None:
        for record in self._resting[0]:
            record.idle += rounds
        if self._held:
            self._held.age += rounds

    def forget(self, context: Context) -> None:
        self.tempo.forget(context)
        self._records.pop(context.id, None)

    def _record(self, context: Context) -> Record:
        if context.id not in self._records:
            kind = context.law.greedy, context.method, bool(context.prediction)
            prior = self._priors.setdefault(kind, Survival(self.most, memory=256.0))
            self._records[context.id] = Record(Survival(self.most, prior), self._wait)
        return self._records[context.id]

    def _welcome(self, context: Context, depth: int, batch: int) -> bool:
        """Before a request's first token only what hardly delays it."""
        if context.generated:
            return True
        added = self.tempo.draft_seconds(depth, 1) + self.tempo.missed_seconds(self.tempo.behind(context))
        return self.tempo.ready and added <= _PROMPT * self.tempo.plain_seconds(batch)

    def _decided(self, contexts: Sequence[Context], limits: dict[int, int], forced: int) -> dict[int, int]:
        """``_best``, once in a few rounds."""
        if not limits or not self.tempo.ready:
            return {}
        who = [context.id for context in contexts]
        if self._held is None or not self._held.stands(who, forced, limits):
            self._held = Decision(who, forced, limits, self._best(contexts, limits, forced))
        self._held.age += 1
        return self._held.nodes

    def _best(self, contexts: Sequence[Context], limits: dict[int, int], forced: int) -> dict[int, int]:
        """Nodes for each place in the batch whose nodes pay; ``forced`` are drafted in any case."""
        places = list(limits)
        stands = [self._records[contexts[i].id].survival.stands()[: limits[i]] for i in places]
        exists = [self._records[contexts[i].id].survival.exists()[: limits[i]] for i in places]
        gains, rows = np.concatenate(stands), np.concatenate(exists)
        worth = np.concatenate(
            [np.minimum.accumulate(np.minimum(s / e.clip(1e-9), 1.0)) for s, e in zip(stands, exists, strict=True)]
        )
        owners = np.repeat(np.arange(len(places)), [limits[i] for i in places])
        ranks = np.concatenate([np.arange(limits[i]) for i in places])
        order = np.argsort(-worth, kind="stable")
        first = ranks[order] == 0
        missed = np.array([self._catching_up(contexts[i]) for i in places])
        batch = len(contexts)
        seconds = (
            self.tempo.draft_table(np.maximum.accumulate(ranks[order]) + 1, np.cumsum(first))
            + np.cumsum(np.where(first, missed[owners[order]], 0.0))
            + self.tempo.pass_table(batch, batch + forced + np.cumsum(rows[order]))
        )
        value = (batch + np.cumsum(gains[order])) / seconds
        best = int(value.argmax())
        without = self._without(batch, forced)
        added = float(seconds[best]) - without
        if (
            value[best] <= _MARGIN * batch / without
            or np.sum(gains[order[: best + 1]]) < _CAUTION * batch * added / without
        ):
            return {}
        chosen = np.bincount(owners[order[: best + 1]], minlength=len(places))
        return {i: int(nodes) for i, nodes in zip(places, chosen, strict=True) if nodes}

    def _try(self, contexts: Sequence[Context], limits: dict[int, int], forced: int) -> int | None:
        """The place of a request whose turn it is to be tried, which is the one that missed least."""
        due = [i for i in limits if self._waited(self._records[contexts[i].id])]
        if not due:
            return None
        place = min(due, key=lambda i: self.tempo.behind(contexts[i]))
        if not self.tempo.ready or self._promising(contexts[place], limits[place], len(contexts), forced):
            return place
        for record in (self._records[contexts[i].id] for i in due):  # who missed more has less to hope for
            record.idle, record.wait = 0, min(_LONGEST, 2 * record.wait)
        return None

    def _waited(self, record: Record) -> bool:
        return not self.tempo.ready or record.idle >= record.wait

    def _promising(self, context: Context, most: int, batch: int, forced: int) -> bool:
        """Whether drafting would pay if it went well, and rows that were never tried cost nothing."""
        depths = np.arange(1.0, min(most, len(_HOPE)) + 1.0)
        seconds = (
            self.tempo.draft_table(depths, np.ones(len(depths)))
            + self._catching_up(context)
            + self.tempo.pass_table(batch, batch + forced + depths, at_best=True)
        )
        value = (batch + np.cumsum(_HOPE[: len(depths)])) / seconds
        return bool(value.max() > _MARGIN * batch / self._without(batch, forced))

    def _without(self, batch: int, forced: int) -> float:
        """Seconds of a round in which nobody drafts who need not."""
        return self.tempo.passes.alone(batch + forced) if forced else self.tempo.plain_seconds(batch)

    def _catching_up(self, context: Context) -> float:
        """Reading what was missed, as seconds a round until it has paid."""
        return self.tempo.missed_seconds(self.tempo.behind(context)) / _HORIZON * 2.0

    def _settle(self, record: Record, step: StepOutput) -> None:
        if not record.asked:
            record.idle += 1
            return
        record.idle = 0
        if self._held and not self._held.nodes:  # something was learned, which may be a reason to draft
            self._held = None
        if record.trial:
            landed = 2 * len(step.verdict.path) >= record.asked
            record.wait = 1 if landed else min(_LONGEST, 2 * max(record.wait, _WAIT // 2))
            self._wait = _WAIT if landed else min(_LONGEST // 4, 2 * self._wait)
            if landed:
                record.survival.doubt(_SURPRISED)
        else:
            record.wait = self._wait = _WAIT
        record.survival.observe(record.asked, step.draft, step.verdict)
