"""HTML page of a plan for a server: the recommendation, speedups by draft length and concurrency, what to paste."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.report.axes import Axis
from foretoken.report.charts import Point, Series, lines
from foretoken.report.document import bullets, document, facts, folded, grid, section, table, verdict
from foretoken.report.markup import Html, element, figure, number, times
from foretoken.report.records import mappings, record

Row = Mapping[str, Any]


def page(plan: Mapping[str, Any]) -> str:
    """Returns an HTML document. plan: ``EndpointPlan.to_dict()`` with its sentences as "verdict"."""
    rows = mappings(plan.get("rows"))
    numbers = list(dict.fromkeys(_at(row) for row in rows))
    setting = record(plan.get("setting"))
    return document(
        "Speedup of speculation on this server",
        [
            _verdict(plan),
            section("Speedup by draft length", grid(*(_by_depth(rows, n) for n in numbers))),
            section("Speedup by concurrency", _by_concurrency(rows)),
            section("Configuration to paste", *(element("pre", line) for line in _strings(plan.get("paste")))),
            *(_table([row for row in rows if _at(row) == n], n) for n in numbers),
            facts(
                {key: value for key, value in setting.items() if not isinstance(value, Mapping)}, "What was measured"
            ),
        ],
        lead="Speedups are over plain decoding at the same concurrency, while all requests are being decoded. "
        "The intervals should contain 95 of 100 further runs over as many requests.",
        footer="tokens/pass: tokens of a sequence in a pass of the model, the model's own token included. A star marks "
        "what was measured; the other rows are predicted.",
    )


def _verdict(plan: Mapping[str, Any]) -> Html:
    notes = _strings(plan.get("notes"))
    if because := plan.get("because"):
        return verdict("open", f"Cannot tell, because {because}", bullets(notes))
    said = _strings(plan.get("verdict")) or [""]
    sure = record(plan.get("choice")).get("sure") is True
    return verdict("good" if sure else "open", said[0], bullets([*said[1:], *notes]))


def _strings(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else []


def _at(row: Row) -> int:
    return int(number(row.get("concurrency")) or 1)


def _name(row: Row) -> str:
    return str(row.get("name") or "?")


def _point(row: Row, where: str) -> Point:
    x, y = number(row.get(where)), number(row.get("speedup"))
    return Point(
        math.nan if x is None else x,
        math.nan if y is None else y,
        number(row.get("low")),
        number(row.get("high")),
        "measured" if row.get("measured") else "predicted",
    )


def _by_depth(rows: Sequence[Row], concurrency: int) -> Html:
    here = [row for row in rows if _at(row) == concurrency and number(row.get("speedup")) is not None]
    names = dict.fromkeys(map(_name, here))
    series = [Series(name, tuple(_point(row, "depth") for row in here if _name(row) == name)) for name in names]
    return _chart(f"{concurrency} at once", series, "draft tokens per pass")


def _by_concurrency(rows: Sequence[Row]) -> Html:
    """The server's own drafter at the draft lengths that were measured."""
    depths = list(dict.fromkeys(row.get("depth") for row in rows if row.get("measured")))
    own = [row for row in rows if row.get("config") is None]
    series = [
        Series(f"{depth} draft tokens", tuple(_point(row, "concurrency") for row in own if row.get("depth") == depth))
        for depth in depths
    ]
    return _chart("Measured draft lengths", series, "requests at once")


def _chart(title: str, series: Sequence[Series], across: str) -> Html:
    if not series:
        return Html()
    note = "The dashed line is plain decoding."
    return lines(title, series, Axis(across), Axis("speedup over plain", zero=True), level=1.0, note=note)


def _table(rows: Sequence[Row], concurrency: int) -> Html:
    heads = ("drafter", "drafts", "speedup", "95 %", "tokens/pass", "95 %", "tokens/s")
    ordered = sorted(rows, key=lambda row: -(number(row.get("speedup")) or 0.0))
    cells = [
        (
            _name(row),
            f"{row.get('depth')}{'*' if row.get('measured') else ''}",
            times(number(row.get("speedup"))),
            _span(row, "low", "high"),
            figure(number(row.get("tokens_per_pass"))),
            _span(row, "tokens_per_pass_low", "tokens_per_pass_high"),
            figure(number(row.get("tokens_per_second"))),
        )
        for row in ordered
    ]
    best = [at for at, row in enumerate(ordered) if row.get("best") is True]
    return section(f"{concurrency} at once", folded(f"{len(cells)} rows", table(heads, cells, best), open_=True))


def _span(row: Row, low: str, high: str) -> str:
    below, above = number(row.get(low)), number(row.get(high))
    return "" if below is None or above is None else f"{below:.2f}–{above:.2f}"
