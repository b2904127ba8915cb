"""HTML page of a plan for a server: the recommendation, speedups by draft length and concurrency, what to paste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.report.document import bullets, document, facts, folded, grid, section, table, verdict
from foretoken.report.markup import Html, element
from foretoken.report.plan import by_speedup, name_of, speedups
from foretoken.report.records import PageRecord


def page(plan: Mapping[str, Any]) -> str:
    """Returns an HTML document. plan: ``EndpointPlan.to_dict()`` with its sentences as "verdict"."""
    root = PageRecord.of(plan)
    groups: dict[int, list[PageRecord]] = {}
    for row in root.records("rows"):
        groups.setdefault(int(row.number("concurrency") or 1), []).append(row)
    setting = {key: value for key, value in root.record("setting").items() if not isinstance(value, Mapping)}
    return document(
        "Speedup of speculation on this server",
        [
            _verdict(root),
            section("Speedup by draft length", grid(*(_by_depth(rows, count) for count, rows in groups.items()))),
            section("Speedup by concurrency", _by_concurrency(root.records("rows"))),
            section("Configuration to paste", *(element("pre", line) for line in root.items_of("paste"))),
            *(_table(rows, count) for count, rows in groups.items()),
            facts(setting, "What was measured"),
        ],
        lead="Speedups are over plain decoding at the same concurrency, while all requests are being decoded. "
        "The intervals should contain 95 of 100 further runs over as many requests.",
        footer="tokens/pass: tokens of a sequence in a pass of the model, the model's own token included. A star marks "
        "what was measured; the other rows are predicted.",
    )


def _verdict(plan: PageRecord) -> Html:
    notes = plan.items_of("notes")
    if because := plan.get("because"):
        return verdict("open", f"Cannot tell, because {because}", bullets(notes))
    headline, *details = plan.items_of("verdict") or [""]
    sure = plan.record("choice").get("sure") is True
    return verdict("good" if sure else "open", headline, bullets([*details, *notes]))


def _kind(row: PageRecord) -> str:
    return "measured" if row.get("measured") else "predicted"


def _by_depth(rows: Sequence[PageRecord], concurrency: int) -> Html:
    usable = [row for row in rows if row.number("speedup") is not None]
    if not usable:
        return Html()
    return speedups(f"{concurrency} at once", usable, ("draft tokens per pass", "depth"), _kind)


def _by_concurrency(rows: Sequence[PageRecord]) -> Html:
    """The server's own drafter at the draft lengths that were measured."""
    depths = {row.get("depth") for row in rows if row.get("measured")}
    usable = [row for row in rows if row.get("config") is None and row.get("depth") in depths]
    if not depths:
        return Html()
    across = "requests at once", "concurrency"
    return speedups("Measured draft lengths", usable, across, _kind, lambda row: f"{row.get('depth')} draft tokens")


def _table(rows: Sequence[PageRecord], concurrency: int) -> Html:
    heads = ("drafter", "drafts", "speedup", "95 %", "tokens/pass", "95 %", "tokens/s")
    ordered, best = by_speedup(rows)
    cells = [
        (
            *(name_of(row), f"{row.get('depth')}{'*' if row.get('measured') else ''}", row.times("speedup")),
            *(row.interval(), row.figure("tokens_per_pass")),
            *(row.interval("tokens_per_pass_low", "tokens_per_pass_high"), row.figure("tokens_per_second")),
        )
        for row in ordered
    ]
    return section(f"{concurrency} at once", folded(f"{len(cells)} rows", table(heads, cells, best), open_=True))
