"""What an audit says: a verdict for each check, its figures, and the evidence in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """What became of a check, or of all of them."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"  # nothing wrong was seen, and too little could have been
    SKIPPED = "skipped"  # does not apply


@dataclass(frozen=True, slots=True)
class Check:
    """One check. numbers: its figures, as JSON has them. evidence: a line for people. seconds: what it took."""

    name: str
    outcome: Outcome
    evidence: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Audit:
    """The verdict on one implementation. subject: what was audited, and with which settings."""

    subject: Mapping[str, Any]
    checks: tuple[Check, ...]
    seconds: float

    @property
    def outcome(self) -> Outcome:
        """Failed if any check failed; passed if none is in doubt and a planted error was found by the same test."""
        outcomes = {check.outcome for check in self.checks}
        if Outcome.FAILED in outcomes:
            return Outcome.FAILED
        controlled = any(c.name == CONTROL and c.outcome is Outcome.PASSED for c in self.checks)
        return Outcome.INCONCLUSIVE if Outcome.INCONCLUSIVE in outcomes or not controlled else Outcome.PASSED

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        named = {outcome: _names(self.checks, outcome) for outcome in Outcome}
        match self.outcome:
            case Outcome.FAILED:
                return f"not exact: {named[Outcome.FAILED]} failed"
            case Outcome.INCONCLUSIVE:
                doubtful = named[Outcome.INCONCLUSIVE] or f"{CONTROL} (not run)"
                return f"nothing wrong was seen, but too little could have been: {doubtful} inconclusive"
            case _:
                ran = sum(check.outcome is Outcome.PASSED for check in self.checks)
                return f"exact as far as {ran} checks can tell, and they found the error planted to test them"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; ``outcome`` and ``summary`` included."""
        checks = [asdict(check) | {"outcome": str(check.outcome)} for check in self.checks]
        return {
            "outcome": str(self.outcome), "summary": self.summary, "seconds": self.seconds,
            "subject": dict(self.subject), "checks": checks,
        }  # fmt: skip


CONTROL = "negative control"


def _names(checks: Sequence[Check], outcome: Outcome) -> str:
    return ", ".join(check.name for check in checks if check.outcome is outcome)
