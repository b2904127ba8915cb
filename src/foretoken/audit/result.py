"""The result of an audit: an outcome, figures and one line of evidence per check."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class CheckOutcome(StrEnum):
    """The outcome of one check, or of the whole audit."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"  # no error was found, and the data are too few to find one
    SKIPPED = "skipped"  # does not apply


@dataclass(frozen=True, slots=True)
class Check:
    """One check. numbers: its figures, JSON-serializable. evidence: one line for people. seconds: its duration."""

    name: str
    outcome: CheckOutcome
    evidence: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Audit:
    """The verdict on one implementation. subject: what was audited, with its settings."""

    subject: Mapping[str, Any]
    checks: tuple[Check, ...]
    seconds: float

    @property
    def outcome(self) -> CheckOutcome:
        """Failed if any check failed; passed if none is inconclusive and the planted errors were found."""
        outcomes = {check.outcome for check in self.checks}
        if CheckOutcome.FAILED in outcomes:
            return CheckOutcome.FAILED
        controlled = any(c.name == CONTROL and c.outcome is CheckOutcome.PASSED for c in self.checks)
        return (
            CheckOutcome.INCONCLUSIVE
            if CheckOutcome.INCONCLUSIVE in outcomes or not controlled
            else CheckOutcome.PASSED
        )

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        named = {
            outcome: ", ".join(check.name for check in self.checks if check.outcome is outcome)
            for outcome in CheckOutcome
        }
        match self.outcome:
            case CheckOutcome.FAILED:
                return f"not exact: {named[CheckOutcome.FAILED]} failed"
            case CheckOutcome.INCONCLUSIVE:
                doubtful = named[CheckOutcome.INCONCLUSIVE] or f"{CONTROL} (not run)"
                return f"no error was found, but not enough was seen: {doubtful} inconclusive"
            case _:
                ran = sum(check.outcome is CheckOutcome.PASSED for check in self.checks)
                return f"no error found by {ran} checks, which did find the errors planted to test them"

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary, ``outcome`` and ``summary`` included."""
        checks = [asdict(check) | {"outcome": str(check.outcome)} for check in self.checks]
        return {
            "outcome": str(self.outcome),
            "summary": self.summary,
            "seconds": self.seconds,
            "subject": dict(self.subject),
            "checks": checks,
        }


CONTROL = "negative control"
