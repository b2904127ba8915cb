"""HTML page of predicted against measured speedups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from foretoken.report.charts import Point, Series, scatter
from foretoken.report.document import cards, document, folded, section, table
from foretoken.report.markup import Html, join, number, percent, times
from foretoken.report.records import mappings, record

WITHIN = 0.1  # relative error that is shaded and counted
Row = Mapping[str, Any]


def page(comparison: Mapping[str, Any]) -> str:
    """Returns an HTML document.

    Args:
        comparison: {"setting": ..., "rows": [{"predicted", "low", "high", "measured", ...}]}
    """
    rows = mappings(comparison.get("rows"))
    return document(
        "Predicted against measured",
        [against(rows), section("Every pair", _table(rows)) if rows else ""],
        record(comparison.get("setting")),
        lead="Speedups over plain decoding, predicted from a sample and then measured on prompts that were not in it.",
    )


def against(rows: Sequence[Row]) -> Html:
    """Returns the scatter plot and its summary, nothing for no rows."""
    pairs = [row for row in rows if number(row.get("measured")) and number(row.get("predicted"))]
    if not pairs:
        return Html()
    names = list(dict.fromkeys(map(_name, pairs)))
    series = [Series(name, tuple(_point(row) for row in pairs if _name(row) == name)) for name in names]
    errors = [abs(_error(row)) for row in pairs]
    held = [covered for row in pairs if (covered := _covered(row)) is not None]
    figures = [
        (
            percent(sum(error <= WITHIN for error in errors) / len(errors)),
            f"within {100 * WITHIN:.0f} % of what was measured",
        ),
        (percent(median(errors)), "median error"),
        *([(percent(sum(held) / len(held)), "measured inside the interval")] if held else []),
        (len(pairs), "pairs"),
    ]
    chart = scatter(
        "Speedup, predicted and measured",
        series,
        "measured",
        "predicted",
        within=WITHIN,
        note=f"Shaded: within {100 * WITHIN:.0f} % of the diagonal. Lines: the predicted interval.",
    )
    return join(cards(figures), chart)


def _name(row: Row) -> str:
    return str(row.get("name") or row.get("method") or "all")


def _point(row: Row) -> Point:
    where = ", ".join(
        f"{word} {row[key]}"
        for key, word in (("num_speculative_tokens", "depth"), ("temperature", "temperature"), ("batch", "batch"))
        if row.get(key) is not None
    )
    x, y = number(row.get("measured")) or 0.0, number(row.get("predicted")) or 0.0
    return Point(x, y, number(row.get("low")), number(row.get("high")), where)


def _error(row: Row) -> float:
    """Relative error of the prediction."""
    return (number(row.get("predicted")) or 0.0) / (number(row.get("measured")) or 1.0) - 1.0


def _covered(row: Row) -> bool | None:
    low, high, measured = (number(row.get(key)) for key in ("low", "high", "measured"))
    return None if low is None or high is None or measured is None else low <= measured <= high


def _table(rows: Sequence[Row]) -> Html:
    heads = ("proposer", "drafts", "temperature", "batch", "predicted", "interval", "measured", "error")
    cells = [
        (
            _name(row),
            row.get("num_speculative_tokens", ""),
            row.get("temperature", ""),
            row.get("batch", ""),
            times(number(row.get("predicted"))),
            f"{times(number(row.get('low')))}–{times(number(row.get('high')))}",
            times(number(row.get("measured"))),
            f"{_error(row):+.1%}" if number(row.get("measured")) else "–",
        )
        for row in rows
    ]
    return folded(f"{len(cells)} rows", table(heads, cells))
