"""Whoever guesses tokens. A proposer sees contexts and hidden states as data and may be wrong, late or absent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.step import Step


@dataclass(frozen=True, slots=True)
class Needs:
    """What a proposer wants from the target, as data: hidden-state taps by layer index."""

    taps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """The truth about one sequence after a round: the step, and the taps of every row the target scored."""

    step: Step
    taps: dict[int, Tensor]


class Proposer:
    """Base of every proposer; this one proposes nothing, which is plain decoding."""

    name: str = "none"
    needs: Needs = Needs()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        """At most ``budgets[i]`` nodes for ``contexts[i]``; budgets were decided before anything is drawn."""
        return [Draft.empty() for _ in contexts]

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        """Called after every round with what was emitted; contexts already hold the new tokens."""

    def forget(self, context: Context) -> None:
        """The sequence is over, for whatever reason; calling it for an unknown one does nothing."""
