"""How much to draft, decided before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core.context import Context
from foretoken.core.step import StepOutput


class Controller:
    """Base of every controller; this one never drafts.

    A budget may depend on anything known before the round, never on a token drawn in it (non-anticipation:
    dropping a drawn token because it looks unlikely bends the law).
    """

    def budgets(self, contexts: Sequence[Context], rooms: Sequence[int]) -> list[int]:
        """Draft nodes for each sequence, at most ``rooms[i]`` (what could still be emitted, less one)."""
        return [0 for _ in contexts]

    def observe(self, steps: Sequence[StepOutput]) -> None:
        """What came of it."""

    def rest(self) -> int:
        """After a round without drafts: for how many more of the same requests it need neither be asked nor told,
        because it would grant nothing in them, whatever they show.
        """
        return 0

    def rested(self, rounds: int) -> None:
        """So many rounds have passed since, of which it was not told."""

    def forget(self, context: Context) -> None:
        """The sequence is over, for whatever reason; calling it for an unknown one does nothing."""
