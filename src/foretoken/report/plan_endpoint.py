"""HTML page of a plan for a server: the recommendation, speedups by draft length and concurrency, what to paste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.report.document import bullets, document, facts, folded, grid, section, table, verdict
from foretoken.report.markup import Html, element, figure, interval, mappings, number, record, sequence, times
from foretoken.report.plan import Row, by_speedup, name_of, speedups


def page(plan: Mapping[str, Any]) -> str:
    """Returns an HTML document. plan: ``EndpointPlan.to_dict()`` with its sentences as "verdict"."""
    groups: dict[int, list[Row]] = {}
    for row in mappings(plan.get("rows")):
        groups.setdefault(int(number(row.get("concurrency")) or 1), []).append(row)
    setting = record(plan.get("setting"))
    return document(
        "Speedup of speculation on this server",
        [
            _verdict(plan),
            section("Speedup by draft length", grid(*(_by_depth(rows, count) for count, rows in groups.items()))),
            section("Speedup by concurrency", _by_concurrency(mappings(plan.get("rows")))),
            section("Configuration to paste", *(element("pre", str(line)) for line in sequence(plan.get("paste")))),
            *(_table(rows, count) for count, rows in groups.items()),
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
    notes = sequence(plan.get("notes"))
    if because := plan.get("because"):
        return verdict("open", f"Cannot tell, because {because}", bullets(notes))
    headline, *details = sequence(plan.get("verdict")) or [""]
    sure = record(plan.get("choice")).get("sure") is True
    return verdict("good" if sure else "open", headline, bullets([*details, *notes]))


def _kind(row: Row) -> str:
    return "measured" if row.get("measured") else "predicted"


def _by_depth(rows: Sequence[Row], concurrency: int) -> Html:
    usable = [row for row in rows if number(row.get("speedup")) is not None]
    return speedups(f"{concurrency} at once", usable, "draft tokens per pass", "depth", _kind) if usable else Html()


def _by_concurrency(rows: Sequence[Row]) -> Html:
    """The server's own drafter at the draft lengths that were measured."""
    depths = {row.get("depth") for row in rows if row.get("measured")}
    own = [row for row in rows if row.get("config") is None and row.get("depth") in depths]
    if not depths:
        return Html()
    name = "{} draft tokens"
    return speedups(
        "Measured draft lengths",
        own,
        "requests at once",
        "concurrency",
        _kind,
        lambda row: name.format(row.get("depth")),
    )


def _table(rows: Sequence[Row], concurrency: int) -> Html:
    heads = ("drafter", "drafts", "speedup", "95 %", "tokens/pass", "95 %", "tokens/s")
    ordered, best = by_speedup(rows)
    cells = [
        (
            name_of(row),
            f"{row.get('depth')}{'*' if row.get('measured') else ''}",
            times(row.get("speedup")),
            interval(row.get("low"), row.get("high")),
            figure(number(row.get("tokens_per_pass"))),
            interval(row.get("tokens_per_pass_low"), row.get("tokens_per_pass_high")),
            figure(number(row.get("tokens_per_second"))),
        )
        for row in ordered
    ]
    return section(f"{concurrency} at once", folded(f"{len(cells)} rows", table(heads, cells, best), open_=True))
