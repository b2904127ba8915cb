"""The controller that drafts as much as pays, by ``goodput``, and tries again where drafting did not pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretoken.control.capped import Batch, Capped, Decision, affordable, requested, worst_case
from foretoken.control.goodput import Allocation, LengthCandidates, floors, goodput, promising
from foretoken.control.ledger import Ledger
from foretoken.control.memory import MemoryWatch
from foretoken.control.survival import Survival, acceptance
from foretoken.core.context import Context
from foretoken.core.part import DraftPart
from foretoken.core.step import StepOutput
from foretoken.costs.curve import Array
from foretoken.costs.model import CostModel


@dataclass(eq=False, slots=True)
class Record:
    """What is known of one request's drafts by one part of the proposer.

    Attributes:
        survival: Its acceptance rates.
        wait: Steps without a draft after which a trial is made.
        since: Step of its last draft, or of the last trial that was refused.
    """

    survival: Survival
    wait: int
    since: int


def never(context: Context) -> bool:
    """Returns False: no drafts are pruned."""
    return False


def only_all(context: Context) -> Collection[DraftPart]:
    """Returns the parts of a proposer that has none."""
    return (DraftPart.ALL,)


class Goodput(Capped):
    """At most ``max_tokens`` draft tokens per request. Requests that ask for a draft length have it.

    Where drafting with a model does not pay for a request, what drafts for free is priced for itself. A request that
    does not draft gets a trial after a wait, which doubles after each trial that fails. No trial is made where drafting
    could not pay off even if it went well.

    Args:
        max_tokens: Largest draft length of a request.
        costs: Measured seconds.
        ledger: Bounds the seconds that may be lost, None for no bound.
        memory: Bounds draft lengths while memory is short.
        prunes: Returns whether what drafts for a request leaves out what does not pay: it knows better than an average
            what does. So such a request, if it is to draft, gets its largest draft length, where that may be lost.
        parts: Returns the parts that may draft for a request.
    """

    def __init__(
        self,
        max_tokens: int,
        costs: CostModel,
        ledger: Ledger | None = None,
        memory: MemoryWatch | None = None,
        prunes: Callable[[Context], bool] = never,
        parts: Callable[[Context], Collection[DraftPart]] = only_all,
    ) -> None:
        super().__init__(max_tokens, costs, ledger, memory)
        self.prunes, self.parts = prunes, parts
        self._records: dict[int, dict[DraftPart, Record]] = {}
        self._kinds: dict[tuple[bool, str | None, bool, DraftPart], Survival] = {}
        self._wait = dict.fromkeys(DraftPart, self.tuning.min_wait)  # of new requests
        self._quiet = 0  # step before which no trial is made, since one failed: many requests wait for theirs

    def decide(self, batch: Batch) -> Decision:
        """Returns the budgets of a batch: those of ``goodput``, and a trial where one is due."""
        contexts, budgets, tuning = batch.contexts, requested(batch.contexts, batch.caps), self.tuning
        missed = dict(zip(batch.own, batch.missed, strict=True))
        worst, short, waits, chosen = 0.0, 0.0, [float(tuning.hold_none)], dict[int, DraftPart]()
        below: dict[int, Sequence[float]] = {}
        trials: list[tuple[dict[int, float], dict[int, DraftPart]]] = []
        for parts in self._sides(batch):
            idle = {i: 0.0 if part is DraftPart.FREE else missed[i] for i, part in parts.items() if not budgets[i]}
            idle = {i: seconds for i, seconds in idle.items() if self._welcome(batch, i, seconds, parts[i])}
            best = self._allocate(batch, idle, sum(budgets), parts, worst)
            for i, length in best.lengths.items():
                budgets[i], chosen[i] = length, parts[i]
            below.update(best.floors)
            worst, short = worst + best.worst, short or best.short
            trials.append(({i: seconds for i, seconds in idle.items() if not budgets[i]}, parts))
        steps: float = tuning.hold if chosen else tuning.hold_none
        if short:
            steps = min(steps, self.steps_until(short, batch.allowed))
        quiet = max(0, self._quiet - self.step)
        for idle, parts in trials:
            place = None if quiet else self._due(batch, idle, sum(budgets), parts)
            if place is not None:
                losses = worst + self._trial_losses(batch, place, idle[place], parts[place])
                if length := affordable(losses, batch.allowed):
                    budgets[place], chosen[place] = length, parts[place]
                    return Decision(budgets, 1, trial=contexts[place].id, parts=chosen, floors=below)
                steps = min(steps, self.steps_until(float(losses[0]), batch.allowed))
            left = [self._left(self._record(contexts[i], parts[i])) for i in idle]
            waits += [max(count, quiet) for count in left if count > 0 or quiet]  # the others wait for the ledger
        if not all(context.generated for context in contexts):
            return Decision(budgets, 1, worst, parts=chosen, floors=below)
        least = min(self._least_steps(len(contexts)), tuning.hold_long if chosen else tuning.hold_none)
        return Decision(budgets, max(least, min(steps, *waits)), worst, parts=chosen, floors=below)

    def observe(self, contexts: Sequence[Context], steps: Sequence[StepOutput]) -> None:
        super().observe(contexts, steps)
        for context, step in zip(contexts, steps, strict=True):
            if context.depth is None and step.position > 0 and step.budget:
                self._learn(self._record(context, step.part), step)

    def describe(self) -> dict[str, Any]:
        kinds = [
            {
                "temperature": "zero" if greedy else "positive",
                "method": method,
                "predicted_output": predicted,
                "part": part.value,
                "accepted": [round(float(p), 4) for p in survival.accepted()],
            }
            for (greedy, method, predicted, part), survival in self._kinds.items()
        ]
        return super().describe() | {"name": "goodput", "acceptance": kinds}

    @property
    def num_known(self) -> int:
        """Number of requests of which something is recorded."""
        return len(self._records)

    def forget(self, context: Context) -> None:
        self._records.pop(context.id, None)

    def _sides(self, batch: Batch) -> list[dict[int, DraftPart]]:
        """Returns the parts that may draft, by index: those with a model, and those without for what these leave.

        Where a plain step is short, the arithmetic of a mixture would take more of it than its other members gain, so
        its model drafts alone.
        """
        light = self.costs.light(len(batch.contexts))
        offers = {i: self.parts(batch.contexts[i]) for i in batch.own}
        alone = {i for i, parts in offers.items() if light and DraftPart.MODEL in parts}
        sides = [
            {i: DraftPart.MODEL if i in alone else DraftPart.ALL for i in offers},
            {i: DraftPart.FREE for i, parts in offers.items() if DraftPart.FREE in parts},
        ]
        return [side for side in sides if side]

    def _least_steps(self, batch: int) -> float:
        """Returns the number of steps for which a decision holds, so that deciding takes little of all time."""
        tuning, plain = self.tuning, self.costs.plain_seconds(batch)
        deciding = tuning.deciding + tuning.deciding_more * (batch - 1)
        return math.ceil(deciding / (tuning.decided * plain)) if plain else 1

    def _record(self, context: Context, part: DraftPart) -> Record:
        records = self._records.setdefault(context.id, {})
        if part not in records:
            tuning, kind = self.tuning, (context.law.greedy, context.method, bool(context.prediction), part)
            if kind not in self._kinds:
                first = tuning.first_free if part is DraftPart.FREE else tuning.first_rank
                self._kinds[kind] = Survival(self.max_tokens, memory=tuning.kind_memory, tuning=tuning, first=first)
            survival = Survival(self.max_tokens, self._kinds[kind], tuning=tuning)
            records[part] = Record(survival, self._wait[part], self.step)
        return records[part]

    def _welcome(self, batch: Batch, place: int, missed: float, part: DraftPart) -> bool:
        """Returns whether a request may draft: before its first token, only if that hardly delays it."""
        if batch.contexts[place].generated:
            return True
        added = self.costs.drafting.seconds(batch.caps[place], 1, free=part is DraftPart.FREE) + missed
        return added <= self.tuning.first_token * self.costs.plain_seconds(len(batch.contexts))

    def _allocate(
        self, batch: Batch, missed: dict[int, float], forced: int, parts: dict[int, DraftPart], worst: float
    ) -> Allocation:
        """Returns ``goodput`` of the requests whose catching up can be paid for.

        Args:
            batch: The requests.
            missed: Seconds of catching up of those that may draft, by index.
            forced: Draft tokens of other requests.
            parts: Which part drafts, by index.
            worst: Seconds that the step may lose with the drafts of others.
        """
        allowed = batch.allowed - worst
        payable = [i for i, seconds in missed.items() if seconds <= allowed]
        if not payable:
            return Allocation({}, short=min(missed.values(), default=0.0))
        free = parts[payable[0]] is DraftPart.FREE
        accepted, exists = acceptance([self._record(batch.contexts[i], parts[i]).survival for i in payable])
        caps, seconds = [batch.caps[i] for i in payable], [missed[i] for i in payable]
        candidates = LengthCandidates(payable, caps, seconds, accepted, exists, free)
        best = goodput(candidates, len(batch.contexts), forced, self.costs, allowed)
        if not any(self._whole(batch, i, parts[i]) for i in best.lengths):
            return best
        whole = [i for i in payable if self._whole(batch, i, parts[i])]
        return self._lengthened(best, candidates, whole, batch, forced, allowed)

    def _whole(self, batch: Batch, place: int, part: DraftPart) -> bool:
        """Returns whether what does not pay is left out of a request's draft, so that it may be long."""
        return part is not DraftPart.MODEL and self.prunes(batch.contexts[place])

    def _lengthened(
        self,
        best: Allocation,
        candidates: LengthCandidates,
        whole: Collection[int],
        batch: Batch,
        forced: int,
        allowed: float,
    ) -> Allocation:
        """Returns an allocation with the largest lengths that may be lost, and with what a token has to be worth.

        Args:
            best: The best lengths on average, which stay where no longer ones may be lost.
            candidates: The requests whose lengths they are.
            whole: Indices in the batch of those whose drafts may be longer, or begin.
            batch: The requests of the step.
            forced: Draft tokens of other requests.
            allowed: Seconds that the step may lose.
        """
        drafts = {*best.lengths, *whole}
        missed = sum(seconds for i, seconds in zip(candidates.places, candidates.missed, strict=True) if i in drafts)
        size, longest = len(batch.contexts), max(batch.caps[i] for i in whole)
        while longest >= max(best.lengths.values()):
            lengths = best.lengths | {i: max(best.lengths.get(i, 0), min(batch.caps[i], longest)) for i in whole}
            drafting = self.costs.drafting.seconds(max(lengths.values()), len(lengths), free=candidates.free)
            proposing = np.full(sum(lengths.values()), drafting + missed)
            loss = float(worst_case(self.costs, size, proposing)[-1])
            if loss <= allowed:
                break
            longest //= 2
        else:
            return best
        rows, count = size + forced + sum(best.lengths.values()), len(lengths)
        kinds = {i: (lengths[i], rows - best.lengths.get(i, 0)) for i in whole}
        known = {kind: floors(kind[0], count, kind[1], size, best.rate, self.costs) for kind in set(kinds.values())}
        return Allocation(lengths, loss, rate=best.rate, floors={i: known[kind] for i, kind in kinds.items()})

    def _left(self, record: Record) -> int:
        """Returns the number of steps until a request's next trial."""
        return record.wait - (self.step - record.since - 1)

    def _due(self, batch: Batch, idle: dict[int, float], drafted: int, parts: dict[int, DraftPart]) -> int | None:
        """Returns the index of a request for a trial, the one that missed least. Doubles the waits if none would pay,
        and lets the cost model doubt what was measured.

        Args:
            batch: The requests.
            idle: Seconds of catching up of those that do not draft, by index.
            drafted: Draft tokens of the others.
            parts: Which part would draft, by index.
        """
        due = [i for i in idle if self._left(self._record(batch.contexts[i], parts[i])) <= 0]
        if not due:
            return None
        place = due[0]
        free, batch_size = parts[place] is DraftPart.FREE, len(batch.contexts)
        if promising(batch.caps[place], idle[place], batch_size, drafted, self.costs, free):
            return place
        if not free:
            self.costs.drafting.refuse()
        for i in due:  # the others missed more
            record = self._record(batch.contexts[i], parts[i])
            record.since, record.wait = self.step, min(self.tuning.max_wait, 2 * record.wait)
        return None

    def _trial_losses(self, batch: Batch, place: int, missed: float, part: DraftPart) -> Array:
        """Returns the seconds that trials of 1, 2, ... tokens lose if all are rejected."""
        depths = np.arange(1.0, min(self.tuning.trial, batch.caps[place]) + 1.0)
        drafting = self.costs.drafting.table(depths, np.ones(len(depths)), free=part is DraftPart.FREE)
        return worst_case(self.costs, len(batch.contexts), drafting + missed)

    def _learn(self, record: Record, step: StepOutput) -> None:
        """Learns from a draft of one request."""
        tuning, part = self.tuning, step.part
        record.since = self.step
        if step.sequence == self.held.trial:
            success = 2 * len(step.verdict.path) >= step.budget
            record.wait = 1 if success else min(tuning.max_wait, 2 * max(record.wait, tuning.min_wait // 2))
            self._wait[part] = tuning.min_wait if success else min(tuning.max_wait // 4, 2 * self._wait[part])
            self._quiet = self.step + (0 if success else tuning.min_wait)
            if success:
                record.survival.discount(tuning.doubt)
        else:
            record.wait = self._wait[part] = tuning.min_wait
        record.survival.observe(step.budget, step.draft, step.verdict)
