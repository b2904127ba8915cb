"""Grades of exactness, the verdict on a draft, and runs of verdicts that are improbable. It must not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:  # it imports torch
    from foretoken.core.draft import Draft


class Exactness(StrEnum):
    """The property that a request's output is promised to have."""

    DISTRIBUTION = "distribution"  # the target's distribution
    TRAJECTORY = "trajectory"  # the same, and one output per seed for all proposers, draft lengths and batches
    TYPICAL = "lossy-typical"  # neither: Medusa's typical acceptance. Outputs carry this label


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted draft tokens and the target's own token.

    Args:
        path: Accepted nodes from the root down. May be empty.
        token: The recovered or bonus token that the target adds after the path.
    """

    path: tuple[int, ...]
    token: int


Kind = Literal["repetition", "all_accepted", "none_accepted"]
"""Kinds of long runs: of accepted drafts in text that repeats itself and in other text, and of rejected drafts."""
KINDS: tuple[Kind, ...] = get_args(Kind)
_REPETITION, _ALL, _NONE = KINDS
_ACCEPTED = 512  # accepted draft tokens of a long run
_REJECTED = 256  # steps of a long run
_PERIOD = 128  # maximum length of a text that is repeated, in tokens


@dataclass(slots=True)
class AcceptanceRun:
    """The current run of steps of one sequence whose drafts were accepted to their end, or not at all.

    Steps without a draft do not end a run. Of 160 greedy texts of up to 1,024 tokens (SmolLM2 on Spec-Bench, the
    bundled pair on HumanEval) 36 had a run of 512 accepted tokens, and 35 of these repeated themselves. Right
    predictions of the client had such runs, too, hence the search for repetitions. Rejected drafts in a row were 52 at
    most, of n-grams, suffixes and recycled trees of 16 nodes on Spec-Bench at a constant length and temperature 1.
    """

    kind: Kind | None = None
    length: int = 0

    def add(self, draft: Draft, verdict: Verdict, text: Sequence[int]) -> Kind | None:
        """Counts a step. Returns the kind of a run that becomes long in this step, else None.

        Args:
            draft: The step's draft.
            verdict: The verdict on it.
            text: Tokens of the sequence.
        """
        if not draft.ids:
            return None
        path, before = verdict.path, self.length
        kind = _NONE if not path else None if path[-1] in draft.parents else _ALL
        if kind != self.kind:
            self.kind, before = kind, 0
        self.length = before + (len(path) or 1)
        if kind is None or not before < (_REJECTED if kind == _NONE else _ACCEPTED) <= self.length:
            return None
        return _REPETITION if kind == _ALL and _repeats(text[-_ACCEPTED:]) else kind


def _repeats(text: Sequence[int]) -> bool:
    return any(text[period:] == text[:-period] for period in range(1, _PERIOD + 1))
