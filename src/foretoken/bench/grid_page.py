"""The table of benchmarks for a terminal, and as one offline HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from foretoken.bench.grid import GridCell, Summary
from foretoken.bench.output import figures
from foretoken.bench.page import HEADS, cells, label
from foretoken.bench.race import RaceRow
from foretoken.report.document import bullets, document, folded, section, table
from foretoken.report.markup import join

Results = Mapping[GridCell, Sequence[RaceRow]]
COLUMNS = ("cell", "default", "best fixed", "plain", "best peer", "default / fixed", "/ plain", "/ peer")


def rich_table(results: Results) -> Table:
    """Returns one line per cell, tokens per second and ratios."""
    return figures(COLUMNS, [line(cell, rows) for cell, rows in results.items()])


def line(cell: GridCell, rows: Sequence[RaceRow]) -> tuple[str, ...]:
    """Returns the figures of a cell under ``COLUMNS``."""
    own = Summary.of(rows)
    return (
        cell.name,
        _rate(own.default),
        _named(own.picked),
        _rate(own.plain),
        _named(own.peer),
        *(_over(own.default, other) for other in (own.picked, own.plain, own.peer)),
    )


def claims(results: Results) -> list[str]:
    """Returns the median and the lowest ratio of the default over the others."""
    found = []
    for name, kind in (
        ("the best fixed configuration", "picked"),
        ("plain decoding", "plain"),
        ("the best peer", "peer"),
    ):
        ratios = [ratio for rows in results.values() if (ratio := _ratio(Summary.of(rows), kind)) is not None]
        if ratios:
            found.append(
                f"{median(ratios):.2f}x {name} in the median of {len(ratios)} cells, {min(ratios):.2f}x at least"
            )
    return found


def grid_page(setting: Mapping[str, Any], results: Results) -> str:
    """Returns a complete HTML document without external resources: the table, then every cell's rows."""
    every = [
        folded(cell.name, table(HEADS, [(label(row), *cells(row)) for row in rows])) for cell, rows in results.items()
    ]
    return document(
        "Benchmarks in one table",
        [
            section(
                "Tokens per second", bullets(claims(results)), table(COLUMNS, [line(*item) for item in results.items()])
            ),
            section("Every system of every cell", join(*every)),
        ],
        setting,
        lead=f"{setting.get('processor', '')}, {setting.get('cores', '?')} cores, {setting.get('date', '')}. The "
        "default is what a user gets without a key. The best fixed configuration and the best peer are the fastest of "
        "those that ran. "
        "Systems took turns within a cell; figures are medians, prefill included.",
        footer="Only ratios within a cell are claims: machines drift between cells.",
    )


def _rate(row: RaceRow | None) -> str:
    return "" if row is None else f"{row.tokens_per_second:.1f}"


def _named(row: RaceRow | None) -> str:
    return "" if row is None else f"{row.tokens_per_second:.1f} ({label(row).removeprefix('foretoken ')})"


def _over(row: RaceRow | None, other: RaceRow | None) -> str:
    return "" if row is None or other is None else f"{row.tokens_per_second / other.tokens_per_second:.2f}"


def _ratio(summary: Summary, kind: str) -> float | None:
    row, other = summary.default, getattr(summary, kind)
    return None if row is None or other is None else float(row.tokens_per_second / other.tokens_per_second)
