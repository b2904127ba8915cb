"""The only event: everything that shows, counts or learns reads ``Step``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.draft import Draft
from foretoken.core.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one round, shared by all sequences that took part in it.

    prompt_rows: rows of prompts that were computed in the round beside the one row that each sequence needs.
    """

    propose: float
    score: float
    verify: float
    commit: float
    batch: int
    prompt_rows: int = 0

    @property
    def total(self) -> float:
        return self.propose + self.score + self.verify + self.commit


@dataclass(frozen=True, slots=True)
class Step:
    """One sequence's part in one round.

    position: tokens the sequence had generated before the round.
    tokens: what was emitted: the accepted path and the target's token, cut at EOS, stop or max_tokens.
    finish_reason: ``"stop"``, ``"length"``, ``"abort"``, ``"error"`` or None while the sequence goes on.
    """

    sequence: int
    position: int
    draft: Draft
    verdict: Verdict
    tokens: tuple[int, ...]
    timings: Timings
    finish_reason: str | None = None

    @property
    def accepted(self) -> int:
        """Drafted tokens that were emitted."""
        return min(len(self.verdict.path), len(self.tokens))

    @property
    def rejected(self) -> tuple[int, ...]:
        """The longest drafted path that was not taken, below the last accepted node; empty if nothing was refused."""
        path, draft = self.verdict.path, self.draft
        if self.accepted < len(path):
            return ()  # the sequence ended inside the accepted path
        at = path[-1] if path else -1
        below = [node for node in range(len(draft)) if node > at and (at < 0 or at in draft.path(node))]
        if not below:
            return ()
        deepest = max(below, key=lambda node: draft.depths[node])
        return draft.path(deepest)[len(path) :]


def steady(steps: Sequence[Step]) -> bool:
    """Whether the round's time tells what such rounds take: no prompt was read in it."""
    return all(step.position > 0 for step in steps) and not any(step.timings.prompt_rows for step in steps[:1])
