"""Deciding costs something, too: while nothing is drafted, the controllers are asked and told in few rounds only.

A tenth of a millisecond in each round is little beside a pass of thirty, and much beside one of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.control.base import Controller
from foretoken.core.context import Context
from foretoken.core.step import StepOutput

_NAP = 15  # rounds, at most, that are passed over at once: the machine's speed is followed by the others;
_AWAKE = 3  # and so many before something may be drafted are not


class Doze(Controller):
    """``inner``, left alone for as long as it rests (``Controller.rest``) and the same requests run."""

    def __init__(self, inner: Controller) -> None:
        self.inner = inner
        self._who: list[int] = []
        self._left = self._missed = 0
        self._asleep = False

    def budgets(self, contexts: Sequence[Context], rooms: Sequence[int]) -> list[int]:
        who = [context.id for context in contexts]
        self._asleep = self._left > 0 and who == self._who
        if self._asleep:
            self._left, self._missed = self._left - 1, self._missed + 1
            return [0] * len(who)
        self._wake()
        budgets = self.inner.budgets(contexts, rooms)
        self._who = [] if any(budgets) else who
        return budgets

    def observe(self, steps: Sequence[StepOutput]) -> None:
        if self._asleep:
            return
        self.inner.observe(steps)
        if self._who:
            self._left = max(0, min(_NAP, self.inner.rest() - _AWAKE))

    def forget(self, context: Context) -> None:
        self._wake()
        self.inner.forget(context)

    def _wake(self) -> None:
        if self._missed:
            self.inner.rested(self._missed)
        self._left = self._missed = 0
        self._asleep = False
