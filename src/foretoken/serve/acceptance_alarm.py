"""Counts requests whose acceptance is improbable for long: text in a loop, or a drafter that is always wrong."""

from __future__ import annotations

from collections import Counter

from foretoken.core.step import StepOutput

ALL, NONE = "all_accepted", "none_accepted"
MIN_TOKENS = {ALL: 512, NONE: 256}
"""Draft tokens in a row, of one sequence, from which a run of a kind is counted."""
_REMEMBERED = 65_536  # sequences; aborted ones are evicted in time


class AcceptanceAlarm:
    """Finds runs of steps of one sequence whose drafts were accepted to their end, or not at all.

    Steps without a draft do not end a run. Each run is counted once.

    Attributes:
        counts: number of runs by kind.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(MIN_TOKENS, 0))
        self._runs: dict[int, tuple[str, int]] = {}  # kind and draft tokens, by sequence; the latest last

    def add(self, step: StepOutput) -> None:
        """Counts one step of one sequence."""
        if not len(step.draft):
            return
        before, tokens = self._runs.pop(step.sequence, ("", 0))
        if step.finish_reason is not None or (kind := self._kind(step)) is None:
            return
        if kind != before:
            tokens = 0
        longer = tokens + (step.accepted or len(step.draft))
        if tokens < MIN_TOKENS[kind] <= longer:
            self.counts[kind] += 1
        self._runs[step.sequence] = kind, longer
        if len(self._runs) > _REMEMBERED:
            del self._runs[next(iter(self._runs))]

    @staticmethod
    def _kind(step: StepOutput) -> str | None:
        """Returns the kind of run that a step belongs to, if any."""
        if not step.accepted:
            return NONE
        return None if step.verdict.path[-1] in step.draft.parents else ALL
