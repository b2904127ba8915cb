"""What a server does with a sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from foretoken.audit.result import Check, CheckOutcome


class Treatment(StrEnum):
    """What was seen of a parameter."""

    HONOURED = "honoured"
    IGNORED = "ignored"
    OTHER = "something else"  # neither what it means nor nothing
    REFUSED = "refused"
    UNDECIDED = "undecided"  # too little to tell
    UNANSWERED = "no answer"
    ABSENT = "not offered"


@dataclass(frozen=True, slots=True)
class ParameterFinding:
    """A row of the table: a parameter without speculation and with it. plain: None where there is no plain side."""

    parameter: str
    plain: Treatment | None
    speculative: Treatment
    how: str

    @property
    def outcome(self) -> CheckOutcome:
        """Failed if speculation changes what the server does with a parameter that it honours."""
        if Treatment.UNANSWERED in (self.plain, self.speculative):
            return CheckOutcome.INCONCLUSIVE
        if self.plain is not Treatment.HONOURED:
            lost = self.plain is None and self.speculative is Treatment.OTHER
            return CheckOutcome.INCONCLUSIVE if lost else CheckOutcome.PASSED
        match self.speculative:
            case Treatment.HONOURED:
                return CheckOutcome.PASSED
            case Treatment.UNDECIDED:
                return CheckOutcome.INCONCLUSIVE
            case _:
                return CheckOutcome.FAILED

    def __str__(self) -> str:
        both = (
            str(self.speculative)
            if self.plain is None
            else f"{self.plain} without speculation, {self.speculative} with"
        )
        return f"{self.parameter} is {both} ({self.how})"


def findings_check(name: str, findings: Sequence[ParameterFinding]) -> Check:
    """Returns the check of some parameters, with the table among its numbers."""
    outcomes = {outcome: [each for each in findings if each.outcome is outcome] for outcome in CheckOutcome}
    numbers = {
        "parameters": [
            {
                "parameter": each.parameter,
                "plain": None if each.plain is None else str(each.plain),
                "speculative": str(each.speculative),
                "how": each.how,
            }
            for each in findings
        ]
    }
    if wrong := outcomes[CheckOutcome.FAILED]:
        return Check(name, CheckOutcome.FAILED, "; ".join(map(str, wrong)), numbers)
    if doubtful := outcomes[CheckOutcome.INCONCLUSIVE]:
        evidence = f"inconclusive, because {'; '.join(map(str, doubtful))}"
        return Check(name, CheckOutcome.INCONCLUSIVE, evidence, numbers)
    groups: dict[Treatment, list[str]] = {}
    for each in findings:
        groups.setdefault(each.speculative, []).append(each.parameter)
    evidence = "; ".join(f"{treatment}: {', '.join(names)}" for treatment, names in groups.items())
    return Check(name, CheckOutcome.PASSED, evidence or "none", numbers)
