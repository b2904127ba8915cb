"""HTML pages of plans: predicted speedups with intervals, the recommendation, and the configuration to paste.

``page`` is that of our engine and vLLM, ``endpoint_page`` that of a server, and ``simulation_page`` shows drafting and
verifying on different workers.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from foretoken.report.charts import Axis, Bar, Point, Series, bars, lines
from foretoken.report.document import figure, interval, listed, number, record, records, render, shown, times

ENGINES = {
    "foretoken": "Foretoken",
    "vllm": "vLLM, as its speculative_config",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "tensorrt_llm": "TensorRT-LLM",
    "max": "Modular MAX",
    "transformers": "transformers",
}
Row = Mapping[str, Any]
Cells = tuple[str, ...]
Setting = tuple[float, int]  # temperature, batch


def page(plan: Mapping[str, Any]) -> str:
    """Returns an HTML document. plan: ``Plan.to_dict()``."""
    groups: dict[Setting, list[Row]] = {}
    for row in records(plan.get("rows")):
        groups.setdefault(_setting(row), []).append(row)
    conditional = plan.get("engine") == "vllm"  # see ``PlanRow.acceptance``
    accepted = "accepted, given those before" if conditional else "share of steps accepted so deep"
    exports = record(plan.get("exports"))
    return render(
        "plan.jinja",
        plan.get("setting"),
        verdict=_verdict(plan),
        depths=[_depths(rows, key) for key, rows in groups.items()],
        exports=[(ENGINES.get(name, name), _pasted(form)) for name, form in exports.items() if form],
        tables=[(_named(key), *_by_speedup(rows, _cells)) for key, rows in groups.items()],
        estimates=records(plan.get("remote_drafting")),
        option_speedup=_option_speedup,
        positions=[_positions(rows, key, accepted) for key, rows in groups.items()],
        costs=_costs(record(plan.get("costs"))),
        predictors=_predictors(records(plan.get("predictors"))),
    )


def name_of(row: Row) -> str:
    return str(row.get("name") or row.get("method") or "?")


def speedups(
    title: str,
    rows: Iterable[Row],
    across: tuple[str, str],
    note: Callable[[Row], str],
    name: Callable[[Row], str] = name_of,
) -> Markup:
    """Returns a chart of speedups over plain decoding.

    Args:
        rows: Predictions with "speedup", "low" and "high".
        across: Label of the horizontal axis, and the key of its value.
        note: Additional text of a row.
    """
    label, key = across
    points: dict[str, list[Point]] = {}
    for row in rows:
        x, y = number(row.get(key), math.nan), number(row.get("speedup")) or math.nan
        point = Point(x, y, number(row.get("low")), number(row.get("high")), note(row))
        points.setdefault(name(row), []).append(point)
    series = [Series(proposer, tuple(sorted(line, key=lambda point: point.x))) for proposer, line in points.items()]
    plain = "The dashed line is plain decoding."
    return lines(title, series, Axis(label), Axis("speedup over plain", zero=True), level=1.0, note=plain)


def _by_speedup(rows: Iterable[Row], cells: Callable[[Row], Cells]) -> tuple[list[Cells], list[int]]:
    """Returns the cells of the rows from the fastest on, and the indices of the best."""
    ordered = sorted(rows, key=lambda row: number(row.get("speedup"), 0.0), reverse=True)
    return [cells(row) for row in ordered], [i for i, row in enumerate(ordered) if row.get("best") is True]


def _setting(row: Row) -> Setting:
    return number(row.get("temperature"), 0.0), int(number(row.get("batch")) or 1)


def _named(setting: Setting) -> str:
    return f"temperature {setting[0]:g}, batch {setting[1]}"


def _drafts(row: Row) -> str:
    return shown(row.get("num_speculative_tokens"))


def _verdict(plan: Row) -> tuple[str, str, list[str]]:
    """Returns the tone, the recommendation over everything, and that for each temperature and batch."""
    choices, best = records(plan.get("choices")), plan.get("best")
    details = [_choice(choice) for choice in choices]
    if not best:
        return "bad", "Do not speculate: plain decoding is faster over all of this", details
    names = (name_of(row) for row in records(plan.get("rows")) if row.get("config") == best)
    name = next(names, record(best).get("method", "?"))
    sure = all(choice.get("sure") and choice.get("speculate") for choice in choices)
    return "good" if sure else "open", f"Speculate with {name}, {_drafts(record(best))} draft tokens per step", details


def _choice(choice: Row) -> str:
    where, row, sure = _named(_setting(choice)).capitalize(), record(choice.get("row")), bool(choice.get("sure"))
    if not row:
        return f"{where}: do not speculate" + ("" if sure else ", though the intervals leave it open")
    span, doubt = interval(row.get("low"), row.get("high")), "" if sure else "; its interval includes 1"
    span = f" ({span})" if span else ""
    return f"{where}: {times(row.get('speedup'))}{span} with {name_of(row)}, {_drafts(row)} draft tokens{doubt}"


def _depths(rows: Sequence[Row], setting: Setting) -> Markup:
    def note(row: Row) -> str:
        return f"{figure(number(row.get('tokens_per_pass')))} tokens per pass"

    return speedups(_named(setting).capitalize(), rows, ("draft tokens per step", "num_speculative_tokens"), note)


def _cells(row: Row) -> Cells:
    return (
        *(name_of(row), _drafts(row), times(row.get("speedup")), interval(row.get("low"), row.get("high"))),
        *(times(row.get("end_to_end")), *_tokens_per_pass(row)),
        figure(number(row.get("step_seconds"), math.nan) * 1e3),
    )


def _tokens_per_pass(row: Row) -> tuple[str, str]:
    span = interval(row.get("tokens_per_pass_low"), row.get("tokens_per_pass_high"))
    return figure(number(row.get("tokens_per_pass"))), span


def _option_speedup(option: Row) -> str:
    depth = option.get("depth")
    return times(option.get("speedup")) + ("" if depth is None else f" ({depth})")


def _pasted(form: object) -> str:
    return form if isinstance(form, str) else json.dumps(form, ensure_ascii=False, default=str)


def _positions(rows: Sequence[Row], setting: Setting, label: str) -> Markup:
    """Acceptance by position of every proposer's longest draft. label: name of the figures."""
    longest: dict[str, list[float]] = {}
    for row in rows:
        rates = [rate for rate in map(number, listed(row.get("acceptance"))) if rate is not None]
        if len(rates) > len(longest.get(name_of(row), ())):
            longest[name_of(row)] = rates
    if not longest:
        return Markup()
    series = [Series(name, tuple(map(Point, range(1, len(rates) + 1), rates))) for name, rates in longest.items()]
    y = Axis(label, zero=True, high=1.0)
    return lines(_named(setting).capitalize(), series, Axis("position in the draft"), y)


def _costs(costs: Row) -> list[Markup]:
    """A chart of the passes of each model and batch. costs: passes with the keys of ``costs.measured.PassCost``."""
    charts: dict[tuple[str, int], list[Row]] = {}
    for name, passes in costs.items():
        for cost in records(passes):
            charts.setdefault((name, int(number(cost.get("batch"), 1))), []).append(cost)
    return [_cost_curves(name, batch, passes) for (name, batch), passes in charts.items()]


def _cost_curves(name: str, batch: int, passes: Sequence[Row]) -> Markup:
    """A line for each context. The limit by memory bandwidth, bare matrix products, does not depend on the context."""
    groups: dict[int, list[Row]] = {}
    for cost in sorted(passes, key=lambda row: [number(row.get(key), 0.0) for key in ("context", "rows")]):
        groups.setdefault(int(number(cost.get("context"), 0)), []).append(cost)
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


def _cost_points(passes: Sequence[Row], key: str = "seconds") -> tuple[Point, ...]:
    points = []
    for cost in passes:
        spread = record(cost.get(key))
        median, low, high = (number(spread.get(which), math.nan) * 1e3 for which in ("median", "low", "high"))
        points.append(Point(number(cost.get("rows"), math.nan), median, low, high))
    return tuple(point for point in points if math.isfinite(point.x) and math.isfinite(point.y))


def _predictors(predictors: Sequence[Row]) -> list[tuple[Markup, Sequence[Row]]]:
    """Returns a chart for each draft and temperature, with its predictors."""
    groups: dict[str, list[Row]] = {}
    for predictor in predictors:
        name = f"{predictor.get('draft')} at temperature {number(predictor.get('temperature'), 0.0):g}"
        groups.setdefault(name, []).append(predictor)
    result: list[tuple[Markup, Sequence[Row]]] = []
    for name, group in groups.items():
        ordered = sorted(group, key=lambda predictor: number(predictor.get("error")) or math.inf)
        items = [
            Bar(word, 100 * number(each.get("error"), math.nan), kind="theirs" if word == "constant" else "ours")
            for each in ordered
            for word in [str(each.get("name", ""))]
        ]
        chart = bars(name, items, "points of error", note="Error of the predicted acceptance, in points")
        result.append((chart, ordered))
    return result


def endpoint_page(plan: Mapping[str, Any]) -> str:
    """Returns an HTML document. plan: ``EndpointPlan.to_dict()`` with its sentences as "verdict"."""
    rows = records(plan.get("rows"))
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(int(number(row.get("concurrency")) or 1), []).append(row)
    measured = record(plan.get("setting"))
    return render(
        "endpoint.jinja",
        verdict=_endpoint_verdict(plan),
        depths=[_by_depth(rows, count) for count, rows in groups.items()],
        concurrencies=_by_concurrency(rows),
        paste=listed(plan.get("paste")),
        tables=[(count, *_by_speedup(rows, _endpoint_cells)) for count, rows in groups.items()],
        measured={key: value for key, value in measured.items() if not isinstance(value, Mapping)},
    )


def _endpoint_verdict(plan: Row) -> tuple[str, str, list[Any]]:
    notes = listed(plan.get("notes"))
    if because := plan.get("because"):
        return "open", f"Cannot tell, because {because}", notes
    headline, *details = listed(plan.get("verdict")) or [""]
    sure = record(plan.get("choice")).get("sure") is True
    return "good" if sure else "open", headline, [*details, *notes]


def _kind(row: Row) -> str:
    return "measured" if row.get("measured") else "predicted"


def _by_depth(rows: Sequence[Row], concurrency: int) -> Markup:
    usable = [row for row in rows if number(row.get("speedup")) is not None]
    if not usable:
        return Markup()
    return speedups(f"{concurrency} at once", usable, ("draft tokens per pass", "depth"), _kind)


def _by_concurrency(rows: Sequence[Row]) -> Markup:
    """The server's own drafter at the draft lengths that were measured."""
    depths = [row.get("depth") for row in rows if row.get("measured")]
    usable = [row for row in rows if row.get("config") is None and row.get("depth") in depths]
    if not depths:
        return Markup()
    across = "requests at once", "concurrency"
    return speedups("Measured draft lengths", usable, across, _kind, lambda row: f"{row.get('depth')} draft tokens")


def _endpoint_cells(row: Row) -> Cells:
    return (
        *(name_of(row), f"{row.get('depth')}{'*' if row.get('measured') else ''}", times(row.get("speedup"))),
        *(interval(row.get("low"), row.get("high")), *_tokens_per_pass(row)),
        figure(number(row.get("tokens_per_second"))),
    )


AXES = {
    "rtt": ("round trip, ms", 1e3),
    "acceptance": ("acceptance", 1.0),
    "verifiers": ("target servers", 1.0),
    "draft-ms": ("draft step, ms", 1e3),
}


def simulation_page(simulation: Mapping[str, Any]) -> str:
    """Returns an HTML document: the speedup of each strategy, by the value that was varied.

    Args:
        simulation: The JSON document of ``foretoken simulate``: outcomes, or a sweep of them, and a verdict. Times are
            in seconds.
    """
    swept = record(simulation.get("sweep"))
    tables = [("Figures", records(simulation.get("outcomes")))]
    if swept:
        label, scale = AXES[str(swept["by"])]
        pairs = zip(swept["values"], swept["outcomes"], strict=True)
        tables = [(f"{label} {value * scale:g}", records(rows)) for value, rows in pairs]
    best = [max(range(len(rows)), key=lambda at: _over_plain(rows[at]), default=0) for _, rows in tables]
    return render(
        "simulate.jinja",
        simulation.get("setting"),
        simulation=simulation,
        chart=_curves(swept) if swept else _bars(tables[0][1]),
        tables=[(name, rows, top) for (name, rows), top in zip(tables, best, strict=True)],
    )


def _over_plain(outcome: Mapping[str, Any]) -> float:
    return float(number(outcome.get("over_plain"), 0.0))


def _curves(swept: Mapping[str, Any]) -> Markup:
    label, scale = AXES[str(swept["by"])]
    points: dict[str, list[Point]] = {}
    for value, outcomes in zip(swept["values"], swept["outcomes"], strict=True):
        for outcome in records(outcomes):
            points.setdefault(str(outcome["strategy"]), []).append(Point(value * scale, _over_plain(outcome)))
    series = [Series(name, tuple(line), reference=name == "plain") for name, line in points.items()]
    y = Axis("speedup over plain", zero=True)
    return lines(f"Over plain decoding, by {label}", series, Axis(label), y, level=1)


def _bars(outcomes: Sequence[Mapping[str, Any]]) -> Markup:
    items = [
        Bar(str(outcome["strategy"]), _over_plain(outcome), kind="theirs" if outcome["strategy"] == "plain" else "ours")
        for outcome in outcomes
    ]
    return bars("Over plain decoding", items, "speedup over plain", level=1.0)
