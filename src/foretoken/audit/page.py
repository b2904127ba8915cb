"""HTML page of an audit: the verdict, each check with its evidence and power, and points of divergence."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from markupsafe import Markup
from pydantic import TypeAdapter

from foretoken.audit.subject import Audit, Check
from foretoken.report.charts import Bar, bars
from foretoken.report.document import figure, percent, render, shown

MAX_ZEROS = 16.0  # maximum of -log10 of a p-value on a chart
DRAWN = ("statistics", "fits", "plants", "divergences", "parameters")  # entries with a chart or table of their own
Row = Mapping[str, Any]


def page(audit: Audit) -> str:
    """Returns an HTML document."""
    subject, checks = audit.subject, audit.checks
    names = [shown(subject[key]).rpartition("/")[2] for key in ("model", "draft_model") if subject.get(key)]
    how = [shown(subject[key]) for key in ("engine", "method") if subject.get(key)]
    return render(
        "audit.jinja",
        audit=audit,
        lead=": ".join(part for part in (", ".join(how), " with ".join(names)) if part),
        counts=[(sum(check.outcome == name for check in checks), name) for name in ("passed", "failed")],
        tokens=sum(check.numbers.get("tokens", 0) for check in checks),
        smallest=_smallest_shift(checks),
        drawn=DRAWN,
        p_values=_p_values,
        finds=_finds,
        found_by=_found_by,
        parted=_parted,
    )


def from_record(record: Mapping[str, Any]) -> str:
    """Returns the HTML document of a record that ``audit --output`` wrote."""
    return page(TypeAdapter(Audit).validate_python(record))


def _smallest_shift(checks: Sequence[Check]) -> float | None:
    """Returns the smallest fraction of probability moved between ranks that a check would have found."""
    statistics = [each for check in checks for each in check.numbers.get("statistics", ())]
    moved = (each["finds"] for each in statistics if each["what"] == "probability moved between ranks")
    return min(moved, default=None)


def _p_values(numbers: Row) -> list[Markup]:
    """Every statistic's p-value in powers of ten beside the level, a chart for each group of statistics."""
    groups: dict[str, list[Bar]] = {}
    for statistic in numbers["statistics"]:
        group, _, name = statistic["name"].rpartition(": ")
        groups.setdefault(group, []).append(Bar(name, _powers(statistic["p_value"])))
    return [bars(group, items, "zeros of p", level=_powers(numbers["level"])) for group, items in groups.items()]


def _powers(p: float) -> float:
    return MAX_ZEROS if p <= 10.0**-MAX_ZEROS else -math.log10(min(1.0, p))


def _finds(statistic: Row) -> str:
    size, what = statistic["finds"], statistic["what"]
    return f"{figure(size, 2)} {what}" if what.startswith("nats") else f"{percent(size)} {what}"


def _found_by(plant: Row) -> str:
    """Returns the statistics that found a planted error, "" if none did."""
    how = ", ".join(f"{name} ({figure(z)})" for name, z in plant["found"].items())
    if plant["impossible"]:
        how = f"{plant['impossible']} tokens of probability 0" + (f", {how}" if how else "")
    return how


def _parted(numbers: Row) -> Iterator[tuple[Row, str, str, str]]:
    """Yields divergences whose texts are known, with the texts' common beginning, and what follows in each."""
    for divergence in numbers["divergences"]:
        if "plain" in divergence:
            plain, other = divergence["plain"], divergence["speculative"]
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, other, strict=False)))
            yield divergence, plain[:common], plain[common:], other[common:]
