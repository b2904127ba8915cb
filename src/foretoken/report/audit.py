"""HTML page of an audit: the verdict, each check with its evidence and power, and points of divergence."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from markupsafe import Markup

from foretoken.report.charts import Bar, bars
from foretoken.report.document import figure, number, percent, record, records, render, shown

MAX_ZEROS = 16.0  # maximum of -log10 of a p-value on a chart
DRAWN = ("statistics", "fits", "plants", "divergences", "parameters")  # entries with a chart or table of their own
Row = Mapping[str, Any]


def page(audit: Mapping[str, Any]) -> str:
    """Returns an HTML document. audit: ``Audit.to_dict()``."""
    subject, checks = record(audit.get("subject")), records(audit.get("checks"))
    names = [shown(subject[key]).rpartition("/")[2] for key in ("model", "draft_model") if subject.get(key)]
    how = [shown(subject[key]) for key in ("engine", "method") if subject.get(key)]
    return render(
        "audit.jinja",
        audit.get("setting"),
        audit=audit,
        lead=": ".join(part for part in (", ".join(how), " with ".join(names)) if part),
        subject=subject,
        checks=[(check, numbers) for check in checks for numbers in [record(check.get("numbers"))]],
        counts=[(sum(check.get("outcome") == name for check in checks), name) for name in ("passed", "failed")],
        tokens=sum(int(number(record(check.get("numbers")).get("tokens"), 0)) for check in checks),
        smallest=_smallest_shift(checks),
        drawn=DRAWN,
        p_values=_p_values,
        finds=_finds,
        found_by=_found_by,
        parted=_parted,
    )


def _smallest_shift(checks: Sequence[Row]) -> float | None:
    """Returns the smallest fraction of probability moved between ranks that a check would have found."""
    statistics = [each for check in checks for each in records(record(check.get("numbers")).get("statistics"))]
    moved = [number(each.get("finds")) for each in statistics if each.get("what") == "probability moved between ranks"]
    return min((value for value in moved if value is not None), default=None)


def _p_values(numbers: Row) -> list[Markup]:
    """Every statistic's p-value in powers of ten beside the level, a chart for each group of statistics."""
    groups: dict[str, list[Bar]] = {}
    for statistic in records(numbers.get("statistics")):
        group, _, name = str(statistic.get("name", "")).rpartition(": ")
        groups.setdefault(group, []).append(Bar(name, _powers(statistic.get("p_value"))))
    level = _powers(numbers.get("level"))
    limit = None if math.isnan(level) else level
    return [bars(group or "statistics", items, "zeros of p", level=limit) for group, items in groups.items()]


def _powers(p: Any) -> float:
    value = number(p)
    if value is None:
        return math.nan
    return MAX_ZEROS if value <= 10.0**-MAX_ZEROS else -math.log10(min(1.0, value))


def _finds(statistic: Row) -> str:
    size, what = number(statistic.get("finds")), str(statistic.get("what", ""))
    if size is None:
        return "–"
    return f"{figure(size, 2)} {what}" if what.startswith("nats") else f"{percent(size)} {what}"


def _found_by(plant: Row) -> str:
    """Returns the statistics that found a planted error, "" if none did."""
    how = ", ".join(f"{name} ({figure(number(z))})" for name, z in record(plant.get("found")).items())
    if plant.get("impossible"):
        how = f"{plant['impossible']} tokens of probability 0" + (f", {how}" if how else "")
    return how


def _parted(numbers: Row) -> Iterator[tuple[Row, str, str, str]]:
    """Yields divergences whose texts are known, with the texts' common beginning, and what follows in each."""
    for divergence in records(numbers.get("divergences")):
        if divergence.get("plain") is not None and divergence.get("speculative") is not None:
            plain, other = str(divergence["plain"]), str(divergence["speculative"])
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, other, strict=False)))
            yield divergence, plain[:common], plain[common:], other[common:]
