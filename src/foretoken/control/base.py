"""Interface of controllers, which choose draft lengths before anything is sampled."""

from collections.abc import Sequence
from typing import Any

from foretoken.core.context import Context
from foretoken.core.step import StepOutput
from foretoken.costs.model import CostModel


class Controller:
    """Base class of controllers. This one never drafts.

    A budget may depend on anything known before the step, never on a token sampled in it (non-anticipation): to drop a
    sampled token because it looks unlikely biases the output.

    Attributes:
        costs: The cost model that it reads. The engine keeps it up to date.
        resting: The last budgets are part of a held decision to draft nothing, so this step need not be observed.
    """

    costs: CostModel | None = None
    resting: bool = False

    def admit(self, context: Context) -> None:
        """Called when a sequence is queued, before any token of it is sampled."""

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        """Returns the number of tokens to draft for each sequence, at most ``max_draft_tokens[i]``. Called every step.

        Args:
            contexts: The sequences of the step.
            max_draft_tokens: Tokens that each can still emit, less one.
        """
        return [0 for _ in contexts]

    def observe(self, contexts: Sequence[Context], steps: Sequence[StepOutput]) -> None:
        """Receives the outcome of the step, before the cost model does. Not called while ``resting``."""

    def describe(self) -> dict[str, Any]:
        """Returns its estimates and last decisions, as JSON. Called between steps."""
        return {"name": "none", "max_tokens": 0}

    @property
    def pause(self) -> str | None:
        """Why the last step had no drafts; None if it had some, or there was none. Valid between steps."""
        return None

    def forget(self, context: Context) -> None:
        """Drops the state of a sequence that has ended or was preempted. Unknown sequences are ignored."""
