"""HTML page of a simulation: the speedup of each strategy, by the value that was varied."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from foretoken.report.charts import Axis, Bar, Point, Series, bars, lines
from foretoken.report.document import number, record, records, render

AXES = {
    "rtt": ("round trip, ms", 1e3),
    "acceptance": ("acceptance", 1.0),
    "verifiers": ("target servers", 1.0),
    "draft-ms": ("draft step, ms", 1e3),
}


def page(simulation: Mapping[str, Any]) -> str:
    """Returns an HTML document.

    Args:
        simulation: The JSON document of ``foretoken simulate``: outcomes, or a sweep of them, and a verdict. Times are
            in seconds.
    """
    swept = record(simulation.get("sweep"))
    tables = [("Figures", records(simulation.get("outcomes")))]
    if swept:
        label, scale = AXES[str(swept["by"])]
        pairs = zip(swept["values"], swept["outcomes"], strict=True)
        tables = [(f"{label} {value * scale:g}", records(rows)) for value, rows in pairs]
    best = [max(range(len(rows)), key=lambda at: _over_plain(rows[at]), default=0) for _, rows in tables]
    return render(
        "simulate.jinja",
        simulation.get("setting"),
        simulation=simulation,
        chart=_curves(swept) if swept else _bars(tables[0][1]),
        tables=[(name, rows, top) for (name, rows), top in zip(tables, best, strict=True)],
    )


def _over_plain(outcome: Mapping[str, Any]) -> float:
    return float(number(outcome.get("over_plain"), 0.0))


def _curves(swept: Mapping[str, Any]) -> Markup:
    label, scale = AXES[str(swept["by"])]
    points: dict[str, list[Point]] = {}
    for value, outcomes in zip(swept["values"], swept["outcomes"], strict=True):
        for outcome in records(outcomes):
            points.setdefault(str(outcome["strategy"]), []).append(Point(value * scale, _over_plain(outcome)))
    series = [Series(name, tuple(line), reference=name == "plain") for name, line in points.items()]
    y = Axis("speedup over plain", zero=True)
    return lines(f"Over plain decoding, by {label}", series, Axis(label), y, level=1)


def _bars(outcomes: Sequence[Mapping[str, Any]]) -> Markup:
    items = [
        Bar(str(outcome["strategy"]), _over_plain(outcome), kind="theirs" if outcome["strategy"] == "plain" else "ours")
        for outcome in outcomes
    ]
    return bars("Over plain decoding", items, "speedup over plain", level=1.0)
