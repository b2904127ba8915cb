"""HTML page of a simulation: the speedup of each strategy, by the value that was varied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.report.charts import Axis, Bar, Point, Series, bars, lines
from foretoken.report.document import Html, PageRecord, document, records, section, table, verdict

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
    root = PageRecord.of(simulation)
    swept, outcomes = root.record("sweep"), root.records("outcomes")
    return document(
        "Speculation across workers, simulated",
        [
            verdict("good" if root.get("pays") else "open", root.text("verdict")),
            section("Speedup", _curves(swept) if swept else _bars(outcomes)),
            *(section(name, _table(rows)) for name, rows in _tables(swept, outcomes)),
        ],
        root.record("setting"),
        lead="Models are clocks here: target passes and draft steps take fixed times, and acceptance is sampled. All "
        "strategies decode the same texts.",
        footer="plain: the target alone. si: draft, wait for the pass. dsi: drafting never waits, several servers "
        "verify. pearl: one pass beside every draft. dsd: si with the window that suits the round trip.",
    )


def _curves(swept: PageRecord) -> Html:
    label, scale = AXES[str(swept["by"])]
    points: dict[str, list[Point]] = {}
    for value, outcomes in zip(swept["values"], swept["outcomes"], strict=True):
        for outcome in records(outcomes):
            points.setdefault(outcome.text("strategy"), []).append(Point(value * scale, outcome.value("over_plain")))
    series = [Series(name, tuple(line), reference=name == "plain") for name, line in points.items()]
    y = Axis("speedup over plain", zero=True)
    return lines(f"Over plain decoding, by {label}", series, Axis(label), y, level=1)


def _bars(outcomes: Sequence[PageRecord]) -> Html:
    kinds = ["theirs" if outcome["strategy"] == "plain" else "ours" for outcome in outcomes]
    items = [
        Bar(outcome.text("strategy"), outcome.value("over_plain"), kind=kind)
        for outcome, kind in zip(outcomes, kinds, strict=True)
    ]
    return bars("Over plain decoding", items, "speedup over plain", level=1.0)


def _tables(swept: PageRecord, outcomes: Sequence[PageRecord]) -> list[tuple[str, Sequence[PageRecord]]]:
    if not swept:
        return [("Figures", outcomes)]
    label, scale = AXES[str(swept["by"])]
    pairs = zip(swept["values"], swept["outcomes"], strict=True)
    return [(f"{label} {value * scale:g}", records(rows)) for value, rows in pairs]


def _table(outcomes: Sequence[PageRecord]) -> Html:
    best = max(range(len(outcomes)), key=lambda at: outcomes[at].value("over_plain"), default=0)
    rows = [
        (
            *(outcome["strategy"], f"{1e3 * outcome['seconds'] / outcome['tokens']:.2f}"),
            *(
                outcome.times("over_plain"),
                outcome.times("over_si"),
                outcome.percent("drafting"),
                outcome.percent("verifying"),
            ),
            *(outcome["drafted"], outcome["wasted"]),
        )
        for outcome in outcomes
    ]
    return table(HEADS, rows, [best])
