"""Bounds on draft lengths: controllers around another one, and a bound that may change while requests run."""

from collections.abc import Sequence
from typing import Any

from foretoken.control.base import Controller
from foretoken.core.context import Context
from foretoken.core.step import StepOutput


class Bounded(Controller):
    """The budgets of another controller under bounds that a subclass sets in ``limits``."""

    def __init__(self, inner: Controller) -> None:
        self.inner, self.costs = inner, inner.costs

    def limits(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> Sequence[int]:
        """Returns the largest budget of each sequence, at most ``max_draft_tokens[i]``."""
        raise NotImplementedError

    def admit(self, context: Context) -> None:
        self.inner.admit(context)

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        budgets = self.inner.budgets(contexts, self.limits(contexts, max_draft_tokens))
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
        return self.inner.pause


class Limited(Bounded):
    """A bound on the budgets of another controller, which also holds for requests that ask for a draft length.

    The bound changes between steps, so it does not depend on a token of the step, and no text depends on it.
    limit: Largest number of draft tokens of a sequence in a step; 0 is plain decoding, None is no bound.
    """

    def __init__(self, inner: Controller, limit: int | None = None) -> None:
        super().__init__(inner)
        self.limit = limit

    def limits(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> Sequence[int]:
        limit = self.limit
        return max_draft_tokens if limit is None else [min(limit, tokens) for tokens in max_draft_tokens]

    @property
    def pause(self) -> str | None:
        return "switched off" if self.limit == 0 else super().pause
