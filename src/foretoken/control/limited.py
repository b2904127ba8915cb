"""A bound on draft lengths that may change while requests run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.control.base import Controller
from foretoken.core.context import Context
from foretoken.core.step import StepOutput


class Limited(Controller):
    """The budgets of another controller under a bound, which also holds for requests that ask for a draft length.

    The bound changes between steps, so it does not depend on a token of the step, and no text depends on it.

    Attributes:
        limit: Largest number of draft tokens of a sequence in a step; 0 is plain decoding, None is no bound.
    """

    def __init__(self, inner: Controller, limit: int | None = None) -> None:
        self.inner, self.limit, self.costs = inner, limit, inner.costs

    def admit(self, context: Context) -> None:
        self.inner.admit(context)

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        limit = self.limit
        tokens = max_draft_tokens if limit is None else [min(limit, tokens) for tokens in max_draft_tokens]
        budgets = self.inner.budgets(contexts, tokens)
        self.resting = self.inner.resting
        return budgets

    def observe(self, contexts: Sequence[Context], steps: Sequence[StepOutput]) -> None:
        self.inner.observe(contexts, steps)

    def forget(self, context: Context) -> None:
        self.inner.forget(context)

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()

    @property
    def pause(self) -> str | None:
        return "switched off" if self.limit == 0 else self.inner.pause
