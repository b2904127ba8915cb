"""HTML pages of plans: predicted speedups with intervals, the recommendation, and the configuration to paste.

``page`` is that of our engine and vLLM, ``endpoint_page`` that of a server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from foretoken.report.charts import Axis, Bar, Point, Series, bars, lines
from foretoken.report.document import (
    Html,
    PageRecord,
    bullets,
    document,
    element,
    facts,
    figure,
    folded,
    grid,
    join,
    number,
    paragraph,
    records,
    section,
    shown,
    table,
    verdict,
)
from foretoken.report.prediction import against

SHOWN = 12  # rows of a table outside of its fold
ENGINES = {
    "foretoken": "Foretoken",
    "vllm": "vLLM, as its speculative_config",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "tensorrt_llm": "TensorRT-LLM",
    "max": "Modular MAX",
    "transformers": "transformers",
}
Setting = tuple[float, int]  # temperature, batch


def page(plan: Mapping[str, Any]) -> str:
    """Returns an HTML document.

    Args:
        plan: ``Plan.to_dict()``. Its optional key "measured" holds rows as of ``prediction.page``.
    """
    root = PageRecord.of(plan)
    groups: dict[Setting, list[PageRecord]] = {}
    for row in root.records("rows"):
        groups.setdefault(_setting(row), []).append(row)
    conditional = root.get("engine") == "vllm"  # see ``PlanRow.acceptance``
    accepted = "accepted, given those before" if conditional else "share of steps accepted so deep"
    return document(
        "Speedup of speculation here",
        [
            _verdict(root),
            section("Speedup by draft length", grid(*(_depths(rows, key) for key, rows in groups.items()))),
            section("Configuration to paste", *_exports(root.record("exports"))),
            *(_table(rows, key) for key, rows in groups.items()),
            section("Drafting on another machine, simulated", *_remote_drafting(root.records("remote_drafting"))),
            section("Acceptance by position", grid(*(_positions(rows, key, accepted) for key, rows in groups.items()))),
            section("Cost of a forward pass", _costs(root.record("costs"))),
            section("Predictors of acceptance", *_predictors(root.records("predictors"))),
            section("Predicted against measured", against(root.records("measured"))),
        ],
        root.record("setting"),
        lead="Speedups are over plain decoding on this machine, predicted from the target's own continuations of the "
        "prompts and from timed decode steps. The intervals should contain 95 of 100 "
        "further runs over as many requests.",
        footer="tokens/pass: emitted tokens over target passes, the target's own token included. A speedup of 1 is "
        "plain decoding. Every configuration is exact: the text has the target's distribution.",
    )


def name_of(row: PageRecord) -> str:
    return str(row.get("name") or row.get("method") or "?")


def speedups(
    title: str,
    rows: Iterable[PageRecord],
    across: tuple[str, str],
    note: Callable[[PageRecord], str],
    name: Callable[[PageRecord], str] = name_of,
) -> Html:
    """Returns a chart of speedups over plain decoding.

    Args:
        rows: Predictions with "speedup", "low" and "high".
        across: Label of the horizontal axis, and the key of its value.
        note: Additional text of a row.
        name: Name of a row's line.
    """
    label, key = across
    points: dict[str, list[Point]] = {}
    for row in rows:
        x, y = row.value(key, math.nan), row.number("speedup") or math.nan
        point = Point(x, y, row.number("low"), row.number("high"), note(row))
        points.setdefault(name(row), []).append(point)
    series = [Series(proposer, tuple(sorted(line, key=lambda point: point.x))) for proposer, line in points.items()]
    plain = "The dashed line is plain decoding."
    return lines(title, series, Axis(label), Axis("speedup over plain", zero=True), level=1.0, note=plain)


def by_speedup(rows: Iterable[PageRecord]) -> tuple[list[PageRecord], list[int]]:
    """Returns the rows from the fastest on, and the indices of the best."""
    ordered = sorted(rows, key=lambda row: row.value("speedup"), reverse=True)
    return ordered, [i for i, row in enumerate(ordered) if row.get("best") is True]


def _setting(row: PageRecord) -> Setting:
    return row.value("temperature"), int(row.number("batch") or 1)


def _named(setting: Setting) -> str:
    return f"temperature {setting[0]:g}, batch {setting[1]}"


def _drafts(row: PageRecord) -> str:
    return shown(row.get("num_speculative_tokens"))


def _verdict(plan: PageRecord) -> Html:
    """The recommendation over everything, and for each temperature and batch."""
    choices, best = plan.records("choices"), plan.get("best")
    details = bullets(map(_choice, choices))
    if not best:
        return verdict("bad", "Do not speculate: plain decoding is faster over all of this", details)
    names = (name_of(row) for row in plan.records("rows") if row.get("config") == best)
    name = next(names, plan.record("best").get("method", "?"))
    sure = all(choice.get("sure") and choice.get("speculate") for choice in choices)
    headline = f"Speculate with {name}, {_drafts(plan.record('best'))} draft tokens per step"
    return verdict("good" if sure else "open", headline, details)


def _choice(choice: PageRecord) -> str:
    where, row, sure = _named(_setting(choice)).capitalize(), choice.record("row"), bool(choice.get("sure"))
    if not row:
        return f"{where}: do not speculate" + ("" if sure else ", though the intervals leave it open")
    doubt = "" if sure else "; its interval includes 1"
    span = f" ({row.interval()})" if row.interval() else ""
    return f"{where}: {row.times('speedup')}{span} with {name_of(row)}, {_drafts(row)} draft tokens{doubt}"


def _depths(rows: Sequence[PageRecord], setting: Setting) -> Html:
    across = "draft tokens per step", "num_speculative_tokens"
    return speedups(
        _named(setting).capitalize(), rows, across, lambda row: f"{row.figure('tokens_per_pass')} tokens per pass"
    )


def _table(rows: Sequence[PageRecord], setting: Setting) -> Html:
    """The fastest rows, and all of them in a fold."""
    heads = ("proposer", "drafts", "speedup", "95 %", "with prompts", "tokens/pass", "95 %", "ms per step")
    ordered, best = by_speedup(rows)
    cells = [
        (
            *(name_of(row), _drafts(row), row.times("speedup"), row.interval(), row.times("end_to_end")),
            *(row.figure("tokens_per_pass"), row.interval("tokens_per_pass_low", "tokens_per_pass_high")),
            figure(row.value("step_seconds", math.nan) * 1e3),
        )
        for row in ordered
    ]
    rest = folded(f"All {len(cells)} rows", table(heads, cells, best)) if len(cells) > SHOWN else ""
    return section(f"Predictions at {_named(setting)}", table(heads, cells[:SHOWN], best), rest)


def _remote_drafting(estimates: Sequence[PageRecord]) -> list[Html]:
    """Speedups of a draft model on another machine, beside drafting here."""
    if not estimates:
        return []
    names = [str(option.get("strategy")) for option in estimates[0].records("options")]
    heads = ("draft", "temperature", "round trip, ms", *("here" if name == "local" else name for name in names))
    cells = [
        (
            *(estimate.get("name"), estimate.figure("temperature"), figure(1e3 * estimate.value("rtt"))),
            *map(_option_speedup, estimate.records("options")),
        )
        for estimate in estimates
    ]
    return [table(heads, cells), bullets(estimate.text("verdict") for estimate in estimates)]


def _option_speedup(option: PageRecord) -> str:
    depth = option.get("depth")
    return option.times("speedup") + ("" if depth is None else f" ({depth})")


def _exports(exports: PageRecord) -> list[Html]:
    """The best configuration in the form of each engine."""
    return [
        join(
            paragraph(ENGINES.get(engine, engine), note=True),
            element("pre", element("code", form if isinstance(form, str) else _json(form)), tabindex=0),
        )
        for engine, form in exports.items()
        if form
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _positions(rows: Sequence[PageRecord], setting: Setting, label: str) -> Html:
    """Acceptance by position of every proposer's longest draft. label: name of the figures."""
    longest: dict[str, list[float]] = {}
    for row in rows:
        rates = [rate for rate in map(number, row.items_of("acceptance")) if rate is not None]
        if len(rates) > len(longest.get(name_of(row), ())):
            longest[name_of(row)] = rates
    if not longest:
        return Html()
    series = [Series(name, tuple(map(Point, range(1, len(rates) + 1), rates))) for name, rates in longest.items()]
    y = Axis(label, zero=True, high=1.0)
    return lines(_named(setting).capitalize(), series, Axis("position in the draft"), y)


def _costs(costs: PageRecord) -> Html:
    """A chart of the passes of each model and batch. costs: passes with the keys of ``costs.measured.PassCost``."""
    charts: dict[tuple[str, int], list[PageRecord]] = {}
    for name, passes in costs.items():
        for cost in records(passes):
            charts.setdefault((name, int(cost.value("batch", 1))), []).append(cost)
    return grid(*(_cost_curves(name, batch, passes) for (name, batch), passes in charts.items()))


def _cost_curves(name: str, batch: int, passes: Sequence[PageRecord]) -> Html:
    """A line for each context. The limit by memory bandwidth, bare matrix products, does not depend on the context."""
    groups: dict[int, list[PageRecord]] = {}
    for cost in sorted(passes, key=lambda row: (row.value("context"), row.value("rows"))):
        groups.setdefault(cost.count("context"), []).append(cost)
    series = [Series(f"{context:,} tokens of context", _cost_points(rows)) for context, rows in groups.items()]
    if limit := _cost_points(next(iter(groups.values())), "floor"):
        points = tuple(Point(point.x, point.y) for point in limit)
        series.append(Series("bare matrix products", points, reference=True))
    sizes = tuple(sorted({point.x for line in series for point in line.points if point.x > 0}))
    return lines(
        name + (f", batch {batch}" if batch > 1 else ""),
        series,
        Axis("rows of a pass", zero=True, at=sizes if len(sizes) <= 6 else ()),
        Axis("ms per pass", zero=True),
        note="Medians, shaded from the fastest to the slowest run. Curves are jagged: nothing is fitted.",
    )


def _cost_points(passes: Sequence[PageRecord], key: str = "seconds") -> tuple[Point, ...]:
    points = []
    for cost in passes:
        spread = cost.record(key)
        median, low, high = (spread.value(which, math.nan) * 1e3 for which in ("median", "low", "high"))
        points.append(Point(cost.value("rows", math.nan), median, low, high))
    return tuple(point for point in points if math.isfinite(point.x) and math.isfinite(point.y))


def _predictors(predictors: Sequence[PageRecord]) -> list[Html]:
    groups: dict[str, list[PageRecord]] = {}
    for predictor in predictors:
        groups.setdefault(f"{predictor.get('draft')} at temperature {predictor.value('temperature'):g}", []).append(
            predictor
        )
    if not groups:
        return []
    about = paragraph(
        "Each is fitted to these requests. Its error is that of predicting the acceptance of a request held out of the "
        "fit. A statistic that is no better than the constant, which predicts the mean, is of no use here."
    )
    return [about, grid(*(_errors(name, group) for name, group in groups.items()))]


def _errors(name: str, predictors: Sequence[PageRecord]) -> Html:
    ordered = sorted(predictors, key=lambda predictor: predictor.number("error") or math.inf)
    items = [
        Bar(word, 100 * predictor.value("error", math.nan), kind="theirs" if word == "constant" else "ours")
        for predictor in ordered
        for word in [predictor.text("name")]
    ]
    rows = [
        (predictor.text("name"), predictor.signed("correlation"), predictor.percent("error")) for predictor in ordered
    ]
    chart = bars(name, items, "points of error", note="Error of the predicted acceptance, in points")
    return element("div", chart, folded("Correlations", table(("statistic", "correlation", "error"), rows)))


def endpoint_page(plan: Mapping[str, Any]) -> str:
    """Returns an HTML document. plan: ``EndpointPlan.to_dict()`` with its sentences as "verdict"."""
    root = PageRecord.of(plan)
    groups: dict[int, list[PageRecord]] = {}
    for row in root.records("rows"):
        groups.setdefault(int(row.number("concurrency") or 1), []).append(row)
    setting = {key: value for key, value in root.record("setting").items() if not isinstance(value, Mapping)}
    return document(
        "Speedup of speculation on this server",
        [
            _endpoint_verdict(root),
            section("Speedup by draft length", grid(*(_by_depth(rows, count) for count, rows in groups.items()))),
            section("Speedup by concurrency", _by_concurrency(root.records("rows"))),
            section("Configuration to paste", *(element("pre", line) for line in root.items_of("paste"))),
            *(_endpoint_table(rows, count) for count, rows in groups.items()),
            facts(setting, "What was measured"),
        ],
        lead="Speedups are over plain decoding at the same concurrency, while all requests are being decoded. "
        "The intervals should contain 95 of 100 further runs over as many requests.",
        footer="tokens/pass: tokens of a sequence in a pass of the model, the model's own token included. A star marks "
        "what was measured; the other rows are predicted.",
    )


def _endpoint_verdict(plan: PageRecord) -> Html:
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


def _endpoint_table(rows: Sequence[PageRecord], concurrency: int) -> Html:
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
