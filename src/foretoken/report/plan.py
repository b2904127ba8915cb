"""HTML page of a plan: predicted speedups with intervals, the recommendation, and the configuration to paste."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from foretoken.report.charts import Axis, Bar, Point, Series, bars, lines
from foretoken.report.document import bullets, document, folded, grid, paragraph, section, table, verdict
from foretoken.report.markup import (
    Html,
    element,
    figure,
    interval,
    join,
    mappings,
    number,
    percent,
    record,
    sequence,
    shown,
    signed,
    times,
)
from foretoken.report.prediction import against

SHOWN = 12  # rows of a table outside of its fold
ENGINES = {"foretoken": "Foretoken", "vllm": "vLLM, as its speculative_config", "transformers": "transformers"}
Row = Mapping[str, Any]
Setting = tuple[float, int]  # temperature, batch


def page(plan: Row) -> str:
    """Returns an HTML document.

    Args:
        plan: ``Plan.to_dict()``. Its optional key "measured" holds rows as of ``prediction.page``.
    """
    groups: dict[Setting, list[Row]] = {}
    for row in mappings(plan.get("rows")):
        groups.setdefault(_setting(row), []).append(row)
    conditional = plan.get("engine") == "vllm"  # see ``PlanRow.acceptance``
    accepted = "accepted, given those before" if conditional else "share of steps accepted so deep"
    return document(
        "Speedup of speculation here",
        [
            _verdict(plan),
            section("Speedup by draft length", grid(*(_depths(rows, key) for key, rows in groups.items()))),
            section("Configuration to paste", *_exports(record(plan.get("exports")))),
            *(_table(rows, key) for key, rows in groups.items()),
            section("Drafting on another machine, simulated", *_remote_drafting(mappings(plan.get("remote_drafting")))),
            section("Acceptance by position", grid(*(_positions(rows, key, accepted) for key, rows in groups.items()))),
            section("Cost of a forward pass", _costs(record(plan.get("costs")))),
            section("Predictors of acceptance", *_predictors(mappings(plan.get("predictors")))),
            section("Predicted against measured", against(mappings(plan.get("measured")))),
        ],
        record(plan.get("setting")),
        lead="Speedups are over plain decoding on this machine, predicted from the target's own continuations of the "
        "prompts and from timed decode steps. The intervals should contain 95 of 100 "
        "further runs over as many requests.",
        footer="tokens/pass: emitted tokens over target passes, the target's own token included. A speedup of 1 is "
        "plain decoding. Every configuration is exact: the text has the target's distribution.",
    )


def name_of(row: Row) -> str:
    """Returns the name of a row's proposer."""
    return str(row.get("name") or row.get("method") or "?")


def speedups(
    title: str,
    rows: Iterable[Row],
    across: str,
    key: str,
    note: Callable[[Row], str],
    name: Callable[[Row], str] = name_of,
) -> Html:
    """Returns a chart of speedups over plain decoding.

    Args:
        title: Its title.
        rows: Predictions with "speedup", "low" and "high".
        across: Label of the horizontal axis.
        key: Key of its value.
        note: Additional text of a row.
        name: Name of a row's line.
    """
    points: dict[str, list[Point]] = {}
    for row in rows:
        x, y = (math.nan if (value := number(row.get(k))) is None else value for k in (key, "speedup"))
        point = Point(x, y or math.nan, number(row.get("low")), number(row.get("high")), note(row))
        points.setdefault(name(row), []).append(point)
    series = [Series(each, tuple(sorted(line, key=lambda point: point.x))) for each, line in points.items()]
    plain = "The dashed line is plain decoding."
    return lines(title, series, Axis(across), Axis("speedup over plain", zero=True), level=1.0, note=plain)


def by_speedup(rows: Iterable[Row]) -> tuple[list[Row], list[int]]:
    """Returns the rows from the fastest on, and the indices of the best."""
    ordered = sorted(rows, key=lambda row: number(row.get("speedup")) or 0.0, reverse=True)
    return ordered, [i for i, row in enumerate(ordered) if row.get("best") is True]


def _setting(row: Row) -> Setting:
    return number(row.get("temperature")) or 0.0, int(number(row.get("batch")) or 1)


def _named(setting: Setting) -> str:
    return f"temperature {setting[0]:g}, batch {setting[1]}"


def _drafts(row: Row) -> str:
    return shown(row.get("num_speculative_tokens"))


def _verdict(plan: Row) -> Html:
    """The recommendation over everything, and for each temperature and batch."""
    choices, best = mappings(plan.get("choices")), plan.get("best")
    details = bullets(map(_choice, choices))
    if not best:
        return verdict("bad", "Do not speculate: plain decoding is faster over all of this", details)
    names = (name_of(row) for row in mappings(plan.get("rows")) if row.get("config") == best)
    sure = all(choice.get("sure") and choice.get("speculate") for choice in choices)
    name = next(names, record(best).get("method", "?"))
    headline = f"Speculate with {name}, {_drafts(record(best))} draft tokens per step"
    return verdict("good" if sure else "open", headline, details)


def _choice(choice: Row) -> str:
    where, row, sure = _named(_setting(choice)).capitalize(), record(choice.get("row")), bool(choice.get("sure"))
    if not row:
        return f"{where}: do not speculate" + ("" if sure else ", though the intervals leave it open")
    doubt = "" if sure else "; its interval includes 1"
    ends = interval(row.get("low"), row.get("high"))
    span = f" ({ends})" if ends else ""
    return f"{where}: {times(row.get('speedup'))}{span} with {name_of(row)}, {_drafts(row)} draft tokens{doubt}"


def _depths(rows: Sequence[Row], setting: Setting) -> Html:
    def note(row: Row) -> str:
        return f"{figure(number(row.get('tokens_per_pass')))} tokens per pass"

    return speedups(_named(setting).capitalize(), rows, "draft tokens per step", "num_speculative_tokens", note)


def _table(rows: Sequence[Row], setting: Setting) -> Html:
    """The fastest rows, and all of them in a fold."""
    heads = ("proposer", "drafts", "speedup", "95 %", "with prompts", "tokens/pass", "95 %", "ms per step")
    ordered, best = by_speedup(rows)
    cells = [
        (
            name_of(row),
            _drafts(row),
            times(row.get("speedup")),
            interval(row.get("low"), row.get("high")),
            times(row.get("end_to_end")),
            figure(number(row.get("tokens_per_pass"))),
            interval(row.get("tokens_per_pass_low"), row.get("tokens_per_pass_high")),
            "–" if (seconds := number(row.get("step_seconds"))) is None else figure(seconds * 1e3),
        )
        for row in ordered
    ]
    rest = folded(f"All {len(cells)} rows", table(heads, cells, best)) if len(cells) > SHOWN else ""
    return section(f"Predictions at {_named(setting)}", table(heads, cells[:SHOWN], best), rest)


def _remote_drafting(estimates: Sequence[Row]) -> list[Html]:
    """Speedups of a draft model on another machine, beside drafting here."""
    if not estimates:
        return []
    names = [str(option.get("strategy")) for option in mappings(estimates[0].get("options"))]
    heads = ("draft", "temperature", "round trip, ms", *("here" if name == "local" else name for name in names))
    cells = [
        (
            each.get("name"),
            figure(number(each.get("temperature"))),
            figure(1e3 * (number(each.get("rtt")) or 0.0)),
            *map(_option_speedup, mappings(each.get("options"))),
        )
        for each in estimates
    ]
    return [table(heads, cells), bullets(str(each.get("verdict", "")) for each in estimates)]


def _option_speedup(option: Row) -> str:
    depth = option.get("depth")
    return times(option.get("speedup")) + ("" if depth is None else f" ({depth})")


def _exports(exports: Row) -> list[Html]:
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


def _positions(rows: Sequence[Row], setting: Setting, label: str) -> Html:
    """Acceptance by position of every proposer's longest draft. label: name of the figures."""
    longest: dict[str, list[float]] = {}
    for row in rows:
        rates = [value for value in map(number, sequence(row.get("acceptance"))) if value is not None]
        if len(rates) > len(longest.get(name_of(row), ())):
            longest[name_of(row)] = rates
    series = [
        Series(name, tuple(Point(position, rate) for position, rate in enumerate(rates, 1)))
        for name, rates in longest.items()
    ]
    if not series:
        return Html()
    title, y = _named(setting).capitalize(), Axis(label, zero=True, high=1.0)
    return lines(title, series, Axis("position in the draft"), y)


def _costs(costs: Row) -> Html:
    """A chart of the passes of each model and batch. costs: passes with the keys of ``costs.measured.PassCost``."""
    charts: dict[tuple[str, int], list[Row]] = {}
    for name, passes in costs.items():
        for each in mappings(passes):
            charts.setdefault((name, int(_known(each, "batch", 1))), []).append(each)
    return grid(*(_cost_curves(name, batch, passes) for (name, batch), passes in charts.items()))


def _known(row: Row, key: str, default: float = 0.0) -> float:
    value = number(row.get(key))
    return default if value is None else value


def _cost_curves(name: str, batch: int, passes: Sequence[Row]) -> Html:
    """A line for each context. The limit by memory bandwidth, bare matrix products, does not depend on the context."""
    groups: dict[int, list[Row]] = {}
    for each in sorted(passes, key=lambda row: (_known(row, "context"), _known(row, "rows"))):
        groups.setdefault(int(_known(each, "context")), []).append(each)
    series = [Series(f"{context:,} tokens of context", _cost_points(rows)) for context, rows in groups.items()]
    if floor := _cost_points(next(iter(groups.values())), "floor"):
        points = tuple(Point(point.x, point.y) for point in floor)
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
    for each in passes:
        rows, spread = number(each.get("rows")), record(each.get(key))
        median, low, high = (
            None if (seconds := number(spread.get(which))) is None else seconds * 1e3
            for which in ("median", "low", "high")
        )
        if rows is not None and median is not None:
            points.append(Point(rows, median, low, high))
    return tuple(points)


def _predictors(predictors: Sequence[Row]) -> list[Html]:
    groups: dict[str, list[Row]] = {}
    for each in predictors:
        name = f"{each.get('draft')} at temperature {_known(each, 'temperature'):g}"
        groups.setdefault(name, []).append(each)
    if not groups:
        return []
    about = paragraph(
        "Each is fitted to these requests. Its error is that of predicting the acceptance of a request held out of the "
        "fit. A statistic that is no better than the constant, which predicts the mean, is of no use here."
    )
    return [about, grid(*(_errors(name, group) for name, group in groups.items()))]


def _errors(name: str, predictors: Sequence[Row]) -> Html:
    ordered = sorted(predictors, key=lambda each: number(each.get("error")) or math.inf)
    items = [
        Bar(word, 100 * _known(each, "error", math.nan), kind="theirs" if word == "constant" else "ours")
        for each in ordered
        for word in [str(each.get("name", ""))]
    ]
    rows = [(each.get("name", ""), signed(each.get("correlation")), percent(each.get("error"))) for each in ordered]
    chart = bars(name, items, "points of error", note="Error of the predicted acceptance, in points")
    return element("div", chart, folded("Correlations", table(("statistic", "correlation", "error"), rows)))
