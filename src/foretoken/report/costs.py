"""Charts of the cost of forward passes by rows, beside the machine's bandwidth floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.report.axes import Axis
from foretoken.report.charts import Point, Series, lines
from foretoken.report.document import grid
from foretoken.report.markup import Html, figure, number
from foretoken.report.records import mappings, record


def curves(costs: Mapping[str, Any]) -> Html:
    """Returns a chart for each model and batch.

    Args:
        costs: Passes by model, each with the keys of ``bench.costs.PassCost``.
    """
    charts: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for name, passes in costs.items():
        for one in mappings(passes):
            charts.setdefault((name, _count(one, "batch", 1)), []).append(one)
    return grid(*(_curve(name, batch, passes) for (name, batch), passes in charts.items()))


def milliseconds(seconds: Any) -> str:
    """Returns recorded seconds in milliseconds, for a table."""
    known = number(seconds)
    return figure(None if known is None else known * 1e3)


def _count(one: Mapping[str, Any], name: str, default: int = 0) -> int:
    known = number(one.get(name))
    return default if known is None else int(known)


def _curve(name: str, batch: int, costs: Sequence[Mapping[str, Any]]) -> Html:
    """A line for each context. The floor, bare matrix products, does not depend on the context."""
    contexts = sorted({_count(one, "context") for one in costs})
    series = [Series(f"{context:,} tokens of context", _points(costs, context, "seconds")) for context in contexts]
    floor = _points(costs, contexts[0], "floor")
    if floor:
        series.append(Series("bare matrix products", floor, reference=True))
    sizes = tuple(sorted({point.x for one in series for point in one.points if point.x > 0}))
    return lines(
        name + (f", batch {batch}" if batch > 1 else ""),
        series,
        Axis("rows of a pass", zero=True, at=sizes if len(sizes) <= 6 else ()),
        Axis("ms per pass", zero=True),
        note="Medians, shaded from the fastest to the slowest run. Curves are jagged: nothing is fitted.",
    )


def _points(costs: Sequence[Mapping[str, Any]], context: int, what: str) -> tuple[Point, ...]:
    """Points of one context. The floor has no interval."""
    made = []
    for one in costs:
        times = record(one.get(what))
        rows, seconds = number(one.get("rows")), number(times.get("median"))
        if _count(one, "context") == context and rows is not None and seconds is not None:
            low, high = (number(times.get(edge)) if what == "seconds" else None for edge in ("low", "high"))
            edges = (None, None) if low is None or high is None else (low * 1e3, high * 1e3)
            made.append(Point(rows, seconds * 1e3, *edges))
    return tuple(sorted(made, key=lambda point: point.x))
