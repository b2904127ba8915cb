"""The controller that drafts as much as pays, by ``goodput``, and tries again where drafting did not pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretoken.control.capped import Batch, Capped, Decision, affordable, requested, worst_case
from foretoken.control.goodput import Allocation, LengthCandidates, goodput, promising
from foretoken.control.ledger import Ledger
from foretoken.control.memory import MemoryWatch
from foretoken.control.survival import Survival, acceptance
from foretoken.core.context import Context
from foretoken.core.step import StepOutput
from foretoken.costs.curve import Array
from foretoken.costs.model import CostModel


@dataclass(eq=False, slots=True)
class Record:
    """What is known of one request.

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


class Goodput(Capped):
    """At most ``max_tokens`` draft tokens per request. Requests that ask for a draft length have it.

    A request that does not draft gets a trial after a wait, which doubles after each trial that fails. No trial is made
    where drafting could not pay off even if it went well.

    Args:
        max_tokens: Largest draft length of a request.
        costs: Measured seconds.
        ledger: Bounds the seconds that may be lost, None for no bound.
        memory: Bounds draft lengths while memory is short.
        prunes: Returns whether what drafts for a request leaves out what does not pay: it knows better than an average
            what does. So such a request, if it is to draft, gets its largest draft length, where that may be lost.
    """

    def __init__(
        self,
        max_tokens: int,
        costs: CostModel,
        ledger: Ledger | None = None,
        memory: MemoryWatch | None = None,
        prunes: Callable[[Context], bool] = never,
    ) -> None:
        super().__init__(max_tokens, costs, ledger, memory)
        self.prunes = prunes
        self._records: dict[int, Record] = {}
        self._kinds: dict[tuple[bool, str | None, bool], Survival] = {}
        self._wait = self.tuning.min_wait  # of new requests

    def decide(self, batch: Batch) -> Decision:
        """Returns the budgets of a batch: those of ``goodput``, and a trial where one is due."""
        contexts, budgets, tuning = batch.contexts, requested(batch.contexts, batch.caps), self.tuning
        records = {i: self._record(contexts[i]) for i in batch.own}
        missed = {i: s for i, s in zip(batch.own, batch.missed, strict=True) if self._welcome(batch, i, s)}
        allocation = self._allocate(batch, missed, sum(budgets))
        for i, length in allocation.lengths.items():
            budgets[i] = length
        idle = {i: seconds for i, seconds in missed.items() if not budgets[i]}
        steps: float = tuning.hold if allocation.lengths else tuning.hold_none
        if allocation.short:
            steps = min(steps, self.steps_until(allocation.short, batch.allowed))
        place = self._due(batch, idle, sum(budgets))
        if place is not None:
            losses = allocation.worst + self._trial_losses(batch, place, missed[place])
            if length := affordable(losses, batch.allowed):
                budgets[place] = length
                return Decision(budgets, 1, trial=contexts[place].id)
            steps = min(steps, self.steps_until(float(losses[0]), batch.allowed))
        waits = [left for i in idle if (left := self._left(records[i])) > 0]  # the others wait for the ledger
        steps = min([steps, *waits]) if all(context.generated for context in contexts) else 1
        return Decision(budgets, steps, allocation.worst)

    def observe(self, contexts: Sequence[Context], steps: Sequence[StepOutput]) -> None:
        super().observe(contexts, steps)
        for context, step in zip(contexts, steps, strict=True):
            if context.depth is None and step.position > 0 and step.budget:
                self._learn(self._record(context), step)

    def describe(self) -> dict[str, Any]:
        kinds = [
            {
                "temperature": "zero" if greedy else "positive",
                "method": method,
                "predicted_output": predicted,
                "accepted": [round(float(p), 4) for p in survival.accepted()],
            }
            for (greedy, method, predicted), survival in self._kinds.items()
        ]
        return super().describe() | {"name": "goodput", "acceptance": kinds}

    @property
    def num_known(self) -> int:
        """Number of requests of which something is recorded."""
        return len(self._records)

    def forget(self, context: Context) -> None:
        self._records.pop(context.id, None)

    def _record(self, context: Context) -> Record:
        if context.id not in self._records:
            kind = context.law.greedy, context.method, bool(context.prediction)
            new = Survival(self.max_tokens, memory=self.tuning.kind_memory, tuning=self.tuning)
            survival = Survival(self.max_tokens, self._kinds.setdefault(kind, new), tuning=self.tuning)
            self._records[context.id] = Record(survival, self._wait, self.step)
        return self._records[context.id]

    def _welcome(self, batch: Batch, place: int, missed: float) -> bool:
        """Returns whether a request may draft: before its first token, only if that hardly delays it."""
        if batch.contexts[place].generated:
            return True
        added = self.costs.draft_seconds(batch.caps[place], 1) + missed
        return added <= self.tuning.first_token * self.costs.plain_seconds(len(batch.contexts))

    def _allocate(self, batch: Batch, missed: dict[int, float], forced: int) -> Allocation:
        """Returns ``goodput`` of the requests whose catching up can be paid for.

        Args:
            batch: The requests.
            missed: Seconds of catching up of those that may draft, by index.
            forced: Draft tokens that other requests asked for.
        """
        payable = [i for i, seconds in missed.items() if seconds <= batch.allowed]
        if not payable:
            return Allocation({}, short=min(missed.values(), default=0.0))
        accepted, exists = acceptance([self._record(batch.contexts[i]).survival for i in payable])
        caps, seconds = [batch.caps[i] for i in payable], [missed[i] for i in payable]
        candidates = LengthCandidates(payable, caps, seconds, accepted, exists)
        best = goodput(candidates, len(batch.contexts), forced, self.costs, batch.allowed)
        return self._whole(batch, best, missed)

    def _whole(self, batch: Batch, best: Allocation, missed: dict[int, float]) -> Allocation:
        """Returns ``best`` with the largest draft lengths where drafts are pruned, if these may be lost."""
        whole = {i for i in best.lengths if self.prunes(batch.contexts[i])}
        if not whole:
            return best
        lengths = {i: batch.caps[i] if i in whole else length for i, length in best.lengths.items()}
        seconds = self.costs.draft_seconds(max(lengths.values()), len(lengths)) + sum(missed[i] for i in lengths)
        worst = float(worst_case(self.costs, len(batch.contexts), np.full(sum(lengths.values()), seconds))[-1])
        return Allocation(lengths, worst) if worst <= batch.allowed else best

    def _left(self, record: Record) -> int:
        """Returns the number of steps until a request's next trial."""
        return record.wait - (self.step - record.since - 1)

    def _due(self, batch: Batch, idle: dict[int, float], drafted: int) -> int | None:
        """Returns the index of a request for a trial, the one that missed least. Doubles the waits if none would pay.

        Args:
            batch: The requests.
            idle: Seconds of catching up of those that do not draft, by index.
            drafted: Draft tokens of the others.
        """
        due = [i for i in idle if self._left(self._records[batch.contexts[i].id]) <= 0]
        if not due:
            return None
        place = due[0]
        if promising(batch.caps[place], idle[place], len(batch.contexts), drafted, self.costs):
            return place
        for i in due:  # the others missed more
            record = self._records[batch.contexts[i].id]
            record.since, record.wait = self.step, min(self.tuning.max_wait, 2 * record.wait)
        return None

    def _trial_losses(self, batch: Batch, place: int, missed: float) -> Array:
        """Returns the seconds that trials of 1, 2, ... tokens lose if all are rejected."""
        depths = np.arange(1.0, min(self.tuning.trial, batch.caps[place]) + 1.0)
        return worst_case(
            self.costs, len(batch.contexts), self.costs.draft_table(depths, np.ones(len(depths))) + missed
        )

    def _learn(self, record: Record, step: StepOutput) -> None:
        """Learns from a draft of one request."""
        tuning = self.tuning
        record.since = self.step
        if step.sequence == self.held.trial:
            success = 2 * len(step.verdict.path) >= step.budget
            record.wait = 1 if success else min(tuning.max_wait, 2 * max(record.wait, tuning.min_wait // 2))
            self._wait = tuning.min_wait if success else min(tuning.max_wait // 4, 2 * self._wait)
            if success:
                record.survival.discount(tuning.doubt)
        else:
            record.wait = self._wait = tuning.min_wait
        record.survival.observe(step.budget, step.draft, step.verdict)
