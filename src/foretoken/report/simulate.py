"""HTML page of a simulation: the speedup of each strategy, by the value that was varied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.report.charts import Axis, Bar, Point, Series, bars, lines
from foretoken.report.document import document, section, table, verdict
from foretoken.report.markup import Html, mappings, number, percent, record, times

HEADS = ("strategy", "ms per token", "over plain", "over SI", "draft busy", "servers busy", "drafted", "wasted")
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
    outcomes = mappings(simulation.get("outcomes"))
    return document(
        "Speculation across workers, simulated",
        [
            verdict("good" if simulation.get("pays") else "open", str(simulation.get("verdict", ""))),
            section("Speedup", _curves(swept) if swept else _bars(outcomes)),
            *(section(name, _table(each)) for name, each in _tables(swept, outcomes)),
        ],
        record(simulation.get("setting")),
        lead="Models are clocks here: target passes and draft steps take fixed times, and acceptance is sampled. All "
        "strategies decode the same texts.",
        footer="plain: the target alone. si: draft, wait for the pass. dsi: drafting never waits, several servers "
        "verify. pearl: one pass beside every draft. dsd: si with the window that suits the round trip.",
    )


def _curves(swept: Mapping[str, Any]) -> Html:
    label, scale = AXES[str(swept["by"])]
    rows = [mappings(each) for each in swept["outcomes"]]
    names = list(dict.fromkeys(str(one["strategy"]) for one in rows[0])) if rows else []
    series = [
        Series(
            name,
            tuple(
                Point(value * scale, number(one.get("over_plain")) or 0.0)
                for value, each in zip(swept["values"], rows, strict=True)
                for one in each
                if one["strategy"] == name
            ),
            reference=name == "plain",
        )
        for name in names
    ]
    return lines(
        f"Over plain decoding, by {label}", series, Axis(label), Axis("speedup over plain", zero=True), level=1
    )


def _bars(outcomes: Sequence[Mapping[str, Any]]) -> Html:
    items = [
        Bar(
            str(one["strategy"]),
            number(one.get("over_plain")) or 0.0,
            kind="ours" if one["strategy"] != "plain" else "theirs",
        )
        for one in outcomes
    ]
    return bars("Over plain decoding", items, "speedup over plain", level=1.0)


def _tables(
    swept: Mapping[str, Any], outcomes: Sequence[Mapping[str, Any]]
) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    if not swept:
        return [("Figures", outcomes)]
    label, scale = AXES[str(swept["by"])]
    pairs = zip(swept["values"], swept["outcomes"], strict=True)
    return [(f"{label} {value * scale:g}", mappings(each)) for value, each in pairs]


def _table(outcomes: Sequence[Mapping[str, Any]]) -> Html:
    best = max(range(len(outcomes)), key=lambda at: number(outcomes[at].get("over_plain")) or 0.0, default=0)
    rows = [
        (
            one["strategy"],
            f"{1e3 * one['seconds'] / one['tokens']:.2f}",
            times(one.get("over_plain")),
            times(one.get("over_si")),
            percent(one.get("drafting")),
            percent(one.get("verifying")),
            one["drafted"],
            one["wasted"],
        )
        for one in outcomes
    ]
    return table(HEADS, rows, [best])
