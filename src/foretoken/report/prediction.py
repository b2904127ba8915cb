"""HTML page of predicted against measured speedups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from foretoken.report.charts import Point, Series, scatter
from foretoken.report.document import Html, PageRecord, cards, document, folded, join, percent, section, table

WITHIN = 0.1  # relative error that is shaded and counted


def page(comparison: Mapping[str, Any]) -> str:
    """Returns an HTML document.

    Args:
        comparison: {"setting": ..., "rows": [{"predicted", "low", "high", "measured", ...}]}
    """
    root = PageRecord.of(comparison)
    rows = root.records("rows")
    return document(
        "Predicted against measured",
        [against(rows), section("Every pair", _table(rows)) if rows else ""],
        root.record("setting"),
        lead="Speedups over plain decoding, predicted from a sample and then measured on prompts that were not in it.",
    )


def against(rows: Sequence[PageRecord]) -> Html:
    """Returns the scatter plot and its summary, nothing for no rows."""
    points: dict[str, list[Point]] = {}
    for row in rows:
        if (measured := row.number("measured")) and (predicted := row.number("predicted")):
            point = Point(measured, predicted, row.number("low"), row.number("high"), _note(row))
            points.setdefault(_name(row), []).append(point)
    pairs = [point for group in points.values() for point in group]
    if not pairs:
        return Html()
    errors = [abs(point.y / point.x - 1) for point in pairs]
    inside = [p.low <= p.x <= p.high for p in pairs if p.low is not None and p.high is not None]
    close = sum(error <= WITHIN for error in errors) / len(errors)
    figures: list[tuple[object, object]] = [
        (percent(close), f"within {100 * WITHIN:.0f} % of what was measured"),
        (percent(median(errors)), "median error"),
        *([(percent(sum(inside) / len(inside)), "measured inside the interval")] if inside else []),
        (len(pairs), "pairs"),
    ]
    series = [Series(name, tuple(group)) for name, group in points.items()]
    note = f"Shaded: within {100 * WITHIN:.0f} % of the diagonal. Lines: the predicted interval."
    title = "Speedup, predicted and measured"
    return join(cards(figures), scatter(title, series, "measured", "predicted", within=WITHIN, note=note))


def _name(row: PageRecord) -> str:
    return str(row.get("name") or row.get("method") or "all")


def _note(row: PageRecord) -> str:
    names = {"num_speculative_tokens": "depth", "temperature": "temperature", "batch": "batch"}
    return ", ".join(f"{name} {row[key]}" for key, name in names.items() if row.get(key) is not None)


def _table(rows: Sequence[PageRecord]) -> Html:
    heads = ("proposer", "drafts", "temperature", "batch", "predicted", "interval", "measured", "error")
    cells = [
        (
            _name(row),
            *(row.get(key, "") for key in ("num_speculative_tokens", "temperature", "batch")),
            *(row.times("predicted"), f"{row.times('low')}–{row.times('high')}", row.times("measured")),
            f"{row.value('predicted') / measured - 1:+.1%}" if measured else "–",
        )
        for row in rows
        for measured in [row.number("measured")]
    ]
    return folded(f"{len(cells)} rows", table(heads, cells))
