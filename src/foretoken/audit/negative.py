"""Negative control: the same test, on as many tokens at most, where an error was planted. It must find it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from foretoken.audit.chance import noncentrality
from foretoken.audit.result import CONTROL, Check, Outcome
from foretoken.audit.sampled import MOST, drawn, leveled, told
from foretoken.audit.subject import Audited
from foretoken.audit.tally import Statistic, Tally
from foretoken.audit.work import Work
from foretoken.core.context import Exactness

FEWEST = 256  # tokens before the first look


@dataclass(frozen=True, slots=True)
class Plant:
    """One planted error. found: by which statistics. needed: tokens that would have found it, None if none would."""

    error: str
    tokens: int
    found: tuple[Statistic, ...]
    impossible: int
    needed: int | None


def negative(work: Work, most: int = MOST) -> Check:
    """Every planted error in turn, each until it is found, its share of the time is over, or ``most`` tokens are."""
    plants = work.subject.planted()
    results: list[Plant] = []
    for index, (error, subject) in enumerate(plants.items()):
        share = (work.deadline - monotonic()) / (len(plants) - index)
        results.append(hunt(replace(work, deadline=monotonic() + share), error, subject, most))
    numbers = {
        "plants": [
            {
                "error": one.error, "tokens": one.tokens, "needed": one.needed,
                "found": {s.name: s.value for s in one.found}, "impossible": one.impossible,
            } for one in results
        ]
    }  # fmt: skip
    missed = [one for one in results if not one.found and not one.impossible]
    if not missed and results:
        evidence = "; ".join(f"found, after {one.tokens:,} tokens: {one.error} ({_how(one)})" for one in results)
        return Check(CONTROL, Outcome.PASSED, evidence, numbers)
    evidence = "; ".join(f"not found in {one.tokens:,} tokens: {one.error} ({_wanted(one)})" for one in missed)
    return Check(CONTROL, Outcome.INCONCLUSIVE, evidence or "no error could be planted", numbers)


def hunt(work: Work, error: str, subject: Audited, most: int) -> Plant:
    """Draws from ``subject`` until its error shows, or there are ``most`` tokens, or no time."""
    tally = drawn(work, subject, Exactness.DISTRIBUTION, most, partial(_caught, level=work.level))
    statistics, level = leveled(tally, work.level)
    found = tuple(one for one in statistics if one.p_value < level)
    return Plant(error, tally.tokens, found, tally.impossible, None if found else _needed(statistics, tally, level))


def _caught(tally: Tally, level: float) -> bool:
    if tally.tokens < FEWEST:
        return False
    statistics, each = leveled(tally, level)
    return tally.impossible > 0 or any(one.p_value < each for one in statistics)


def _needed(statistics: list[Statistic], tally: Tally, level: float) -> int | None:
    """Deviations grow with the square root of the tokens, noncentralities with the tokens themselves."""
    factors = []
    for one in statistics:
        seen = one.value - one.dof if one.dof else one.value**2 - 1.0
        if seen > 0.0:
            factors.append(noncentrality(one.dof or 1, level) / seen)
    return math.ceil(tally.tokens * max(1.0, min(factors))) if factors else None


def _how(plant: Plant) -> str:
    return told(plant.found) if plant.found else f"{plant.impossible} tokens of probability 0"


def _wanted(plant: Plant) -> str:
    if plant.needed is None:
        return "no sign of it"
    return f"about {plant.needed:,} would show it, a budget {plant.needed / plant.tokens:.1f} times as long"
