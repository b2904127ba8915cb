"""Negative control: the same test, on at most as many tokens, must find errors that are planted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic

from foretoken.audit.result import CONTROL, Check, CheckOutcome
from foretoken.audit.sampled import MAX_TOKENS, drawn, leveled, most_significant
from foretoken.audit.subject import Audited, AuditTask
from foretoken.audit.tally import Statistic, TokenTally, noncentrality
from foretoken.core.context import Exactness

FEWEST = 256  # tokens before the first test


@dataclass(frozen=True, slots=True)
class Plant:
    """One planted error. found: the tests that found it. needed: tokens needed to find it, None if unknown."""

    error: str
    tokens: int
    found: tuple[Statistic, ...]
    impossible: int
    needed: int | None


def negative(work: AuditTask, max_tokens: int = MAX_TOKENS) -> Check:
    """Samples each planted error until it is found, its share of the time is over, or ``max_tokens`` are reached."""
    plants = work.subject.planted()
    results: list[Plant] = []
    for index, (error, subject) in enumerate(plants.items()):
        share = (work.deadline - monotonic()) / (len(plants) - index)
        results.append(find_error(replace(work, deadline=monotonic() + share), error, subject, max_tokens))
    return control_check(results)


def control_check(results: Sequence[Plant]) -> Check:
    """Returns the check that every planted error was found, at least one."""
    numbers = {
        "plants": [
            {
                "error": one.error,
                "tokens": one.tokens,
                "needed": one.needed,
                "found": {s.name: s.value for s in one.found},
                "impossible": one.impossible,
            }
            for one in results
        ]
    }
    missed = [one for one in results if not one.found and not one.impossible]
    if not missed and results:
        evidence = "; ".join(f"found, after {one.tokens:,} tokens: {one.error} ({_how(one)})" for one in results)
        return Check(CONTROL, CheckOutcome.PASSED, evidence, numbers)
    evidence = "; ".join(f"not found in {one.tokens:,} tokens: {one.error} ({_effort(one)})" for one in missed)
    return Check(CONTROL, CheckOutcome.INCONCLUSIVE, evidence or "no error could be planted", numbers)


def find_error(work: AuditTask, error: str, subject: Audited, max_tokens: int) -> Plant:
    """Samples from ``subject`` until its error is found, ``max_tokens`` are reached, or the deadline has passed."""

    def enough(tally: TokenTally) -> bool:
        return tally.tokens >= FEWEST and (tally.impossible > 0 or bool(_significant(*leveled(tally, work.level))))

    return plant_of(error, drawn(work, subject, Exactness.DISTRIBUTION, max_tokens, enough), work.level)


def plant_of(error: str, tally: TokenTally, level: float) -> Plant:
    """Returns whether the tests, together at ``level``, found an error in sampled tokens, and their power."""
    statistics, level = leveled(tally, level)
    found = _significant(statistics, level)
    return Plant(error, tally.tokens, found, tally.impossible, None if found else _needed(statistics, tally, level))


def _significant(statistics: Sequence[Statistic], level: float) -> tuple[Statistic, ...]:
    return tuple(one for one in statistics if one.p_value < level)


def _needed(statistics: list[Statistic], tally: TokenTally, level: float) -> int | None:
    """Estimates the tokens needed: deviations grow with the square root of their number, noncentralities linearly."""
    factors = []
    for one in statistics:
        seen = one.value - one.dof if one.dof else one.value**2 - 1.0
        if seen > 0.0:
            factors.append(noncentrality(one.dof or 1, level) / seen)
    return math.ceil(tally.tokens * max(1.0, min(factors))) if factors else None


def _how(plant: Plant) -> str:
    return most_significant(plant.found) if plant.found else f"{plant.impossible} tokens of probability 0"


def _effort(plant: Plant) -> str:
    if plant.needed is None:
        return "no sign of it"
    return f"about {plant.needed:,} would show it, a budget {plant.needed / plant.tokens:.1f} times as long"
