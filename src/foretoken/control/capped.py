"""Draft lengths within caps, and decisions that hold for some steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretoken.control.base import Controller
from foretoken.control.fixed import caps, halvings, short_of_memory
from foretoken.control.ledger import Ledger
from foretoken.control.memory import MemoryWatch
from foretoken.core.context import Context
from foretoken.core.part import DraftPart
from foretoken.core.step import StepOutput
from foretoken.costs.curve import Array, Indices
from foretoken.costs.model import CostModel


@dataclass(frozen=True, slots=True)
class Decision:
    """Budgets of one batch.

    Attributes:
        budgets: Draft tokens of each request.
        steps: Number of steps for which the budgets hold while the same requests run.
        worst: Seconds that a step loses if all draft tokens are rejected. Requests' own draft lengths do not count.
        trial: Identifier of the request whose draft is a trial.
        parts: Which part of the proposer drafts, by index of the request; where it is missing, all of it.
        floors: See ``Context.floors``, by index of the request.
    """

    budgets: list[int]
    steps: float
    worst: float = 0.0
    trial: int | None = None
    parts: Mapping[int, DraftPart] = field(default_factory=dict)
    floors: Mapping[int, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of a step, as a decision sees them.

    Attributes:
        contexts: The requests.
        caps: Maximum number of draft tokens of each.
        allowed: Seconds that the step may lose.
        own: Indices of the requests whose draft length is decided here, those that missed fewest tokens first.
        missed: Seconds in which the proposer would catch up on each of ``own``.
    """

    contexts: Sequence[Context]
    caps: Sequence[int]
    allowed: float
    own: list[int]
    missed: list[float]


class Capped(Controller):
    """A constant draft length, as far as the ledger and memory allow. Base of controllers that choose the length.

    A decision holds for some steps while the same requests run and their caps allow it. While a decision to draft
    nothing holds, most steps are not observed.

    Args:
        max_tokens: Largest draft length of a request.
        costs: Measured seconds.
        ledger: Bounds the seconds that may be lost, None for no bound.
        memory: Bounds draft lengths while memory is short.
    """

    costs: CostModel

    def __init__(
        self, max_tokens: int, costs: CostModel, ledger: Ledger | None = None, memory: MemoryWatch | None = None
    ) -> None:
        self.max_tokens, self.costs, self.ledger, self.memory = max_tokens, costs, ledger, memory
        self.tuning = costs.tuning
        self.step = 0  # steps so far
        self.held = Decision([], 0)
        self._age = 0  # steps that it was held for
        self._ids: list[int] = []
        self._caps: list[int] = []
        self._income = 0.0

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        self.step += 1
        limits = caps(contexts, max_draft_tokens, self.max_tokens, self.memory)
        ids, self.resting = [context.id for context in contexts], False
        holds, drafting = self._holds(ids, limits), any(self.held.budgets)
        if (drafting or not holds) and self.costs.plain_due(len(ids)):
            self._ids = self._ids if holds else []
            return requested(contexts, limits)
        if not holds:
            self._age, self._ids, self._caps = 0, ids, limits
            self._income = self.ledger.income(self.costs, len(ids)) if self.ledger else 0.0
            self.held = self._decision(contexts, limits)
            for i, context in enumerate(contexts):
                context.part = self.held.parts.get(i, DraftPart.ALL)
                context.floors = self.held.floors.get(i, ())
        elif not drafting and self._age % (self.tuning.skipped + 1) and self.held.steps - self._age > self.tuning.awake:
            self.resting = True
            if self.ledger:
                self.ledger.add(self._income)
        self._age += 1
        return self.held.budgets

    def observe(self, contexts: Sequence[Context], steps: Sequence[StepOutput]) -> None:
        if self.ledger:
            self.ledger.observe(contexts, steps, self.costs)

    def describe(self) -> dict[str, Any]:
        return {
            "name": "fixed",
            "max_tokens": self.max_tokens,
            "memory_halvings": halvings(self.memory),
            "budgets": list(self.held.budgets),
            "balance_seconds": None if self.ledger is None else self.ledger.balance,
        }

    @property
    def pause(self) -> str | None:
        if not self._ids or any(self.held.budgets):
            return None
        if reason := short_of_memory(self.memory, self.max_tokens):
            return reason
        if self.ledger is not None and self.ledger.balance is not None and self.ledger.balance <= 0.0:
            return "drafting has lost as many seconds as it may"
        return "drafting would not pay at the measured costs and acceptance"

    def decide(self, batch: Batch) -> Decision:
        """Returns the budgets of a batch: as much of the constant length as the ledger allows, for all or for some."""
        lengths = [batch.caps[i] for i in batch.own]
        owners, ranks = np.nonzero(np.arange(max(lengths)) < np.asarray(lengths)[:, None])
        drafting, catching_up = drafting_seconds(self.costs, owners, ranks, batch.missed)
        worst = worst_case(self.costs, len(batch.contexts), drafting + catching_up)
        count, budgets = affordable(worst, batch.allowed), requested(batch.contexts, batch.caps)
        if not count:
            return Decision(budgets, self.steps_until(float(worst[0]), batch.allowed))
        for i, nodes in zip(batch.own, np.bincount(owners[:count], minlength=len(lengths)), strict=True):
            budgets[i] = int(nodes)
        return Decision(budgets, self.tuning.hold, float(worst[count - 1]))

    def steps_until(self, seconds: float, allowed: float) -> float:
        """Returns the number of plain steps until the ledger, which allows ``allowed`` seconds, allows ``seconds``."""
        if not self._income:
            return self.tuning.hold_none
        return min(self.tuning.hold_none, max(1, math.ceil((seconds - allowed) / self._income)))

    def _decision(self, contexts: Sequence[Context], limits: Sequence[int]) -> Decision:
        """Returns ``decide``, or a first draft where the time of drafting is unknown."""
        budgets, allowed = requested(contexts, limits), math.inf
        if self.ledger:
            allowed = self.ledger.cap(self.costs, len(contexts))
        own = [i for i, context in enumerate(contexts) if context.depth is None and limits[i] > 0]
        if not own:
            return Decision(budgets, self.tuning.hold_none)
        own.sort(key=lambda i: contexts[i].missed_tokens)
        if self.costs.drafting.known:
            missed = [self.costs.drafting.missed(contexts[i].missed_tokens) for i in own]
            return self.decide(Batch(contexts, limits, allowed, own, missed))
        first = next((i for i in own if contexts[i].generated), None)
        if first is None or allowed <= 0.0:
            return Decision(budgets, 1)
        budgets[first] = min(self.tuning.unknown if self.ledger else self.tuning.trial, limits[first])
        return Decision(budgets, 1, trial=contexts[first].id)

    def _holds(self, ids: list[int], limits: list[int]) -> bool:
        """Returns whether the last decision holds: its caps may only have become smaller, and still allow it."""
        if self._age >= self.held.steps or ids != self._ids:
            return False
        if limits != self._caps and not all(
            budget <= limit <= cap for budget, limit, cap in zip(self.held.budgets, limits, self._caps, strict=True)
        ):
            return False
        return not self.ledger or not self.held.worst or self.held.worst <= self.ledger.cap(self.costs, len(ids))


def requested(contexts: Sequence[Context], limits: Sequence[int]) -> list[int]:
    """Returns the budgets of a step in which only requests that ask for a draft length draft."""
    return [0 if context.depth is None else limit for context, limit in zip(contexts, limits, strict=True)]


def drafting_seconds(
    costs: CostModel, owners: Indices, ranks: Indices, missed: Sequence[float], free: bool = False
) -> tuple[Array, Array]:
    """Returns the seconds of drafting the first 1, 2, ... nodes, and of catching up before it, [N] each.

    Args:
        costs: Measured seconds.
        owners: [N], the request of each node, in the order in which nodes are added.
        ranks: [N], the rank of each node, from 0.
        missed: Seconds of catching up of each request.
        free: No model drafts.
    """
    first = ranks == 0
    drafting = costs.drafting.table(np.maximum.accumulate(ranks) + 1, np.cumsum(first), free=free)
    return drafting, np.cumsum(np.where(first, np.asarray(missed)[owners], 0.0))


def worst_case(costs: CostModel, batch: int, proposing: Array) -> Array:
    """Returns the seconds that steps with 1, 2, ... nodes lose if all nodes are rejected, [N].

    Args:
        costs: Measured seconds.
        batch: Number of requests.
        proposing: [N], seconds of drafting and catching up.
    """
    rows = batch + np.arange(1.0, len(proposing) + 1.0)
    return np.asarray(proposing + np.maximum(0.0, costs.step_table(batch, rows) - costs.plain_seconds(batch)))


def affordable(worst: Array, allowed: float) -> int:
    """Returns how many nodes may be drafted, in order, where the first 1, 2, ... may lose ``worst`` seconds [N]."""
    over = worst > allowed
    return int(np.argmax(over)) if over.any() else len(worst)
