"""What passes cost by rows, beside the floor that the machine's bandwidth sets: one chart for each model and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.report.axes import Axis
from foretoken.report.charts import Point, Series, lines
from foretoken.report.document import grid
from foretoken.report.markup import Html, figure, number
from foretoken.report.records import shown


def curves(costs: Sequence[Mapping[str, Any]]) -> Html:
    """costs: passes as ``Costs.to_dict`` writes them: model, rows, context, batch; seconds, low, high, floor."""
    kinds = list(dict.fromkeys((shown(one.get("model", "model")), _count(one, "batch", 1)) for one in costs))
    charts = [
        _curve(
            name, batch, [c for c in costs if (shown(c.get("model", "model")), _count(c, "batch", 1)) == (name, batch)]
        )
        for name, batch in kinds
    ]
    return grid(*charts)


def milliseconds(seconds: Any) -> str:
    """Recorded seconds as a table has them."""
    known = number(seconds)
    return figure(None if known is None else known * 1e3)


def _count(one: Mapping[str, Any], name: str, default: int = 0) -> int:
    known = number(one.get(name))
    return default if known is None else int(known)


def _curve(name: str, batch: int, costs: Sequence[Mapping[str, Any]]) -> Html:
    """A line for each context; the floor is the bare products', which know no context."""
    contexts = sorted({_count(one, "context") for one in costs})
    series = [Series(f"{context:,} tokens before", _points(costs, context, "seconds")) for context in contexts]
    floor = _points(costs, contexts[0], "floor")
    if floor:
        series.append(Series("the weights read once, bare", floor, reference=True))
    sizes = tuple(sorted({point.x for one in series for point in one.points if point.x > 0}))
    return lines(
        name + (f", batch {batch}" if batch > 1 else ""),
        series,
        Axis("rows of a pass", zero=True, at=sizes if len(sizes) <= 6 else ()),
        Axis("ms a pass", zero=True),
        note="Medians, shaded from the fastest to the slowest turn. Curves are jagged: nothing is fitted.",
    )


def _points(costs: Sequence[Mapping[str, Any]], context: int, what: str) -> tuple[Point, ...]:
    """Of the floor the median alone."""
    made = []
    for one in costs:
        rows, seconds = number(one.get("rows")), number(one.get(what))
        if _count(one, "context") == context and rows is not None and seconds is not None:
            low, high = (number(one.get(edge)) if what == "seconds" else None for edge in ("low", "high"))
            edges = (None, None) if low is None or high is None else (low * 1e3, high * 1e3)
            made.append(Point(rows, seconds * 1e3, *edges))
    return tuple(sorted(made, key=lambda point: point.x))
