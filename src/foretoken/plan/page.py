"""HTML pages of plans: predicted speedups with intervals, the recommendation, and the configuration to paste.

``page`` is that of our engine and vLLM, ``endpoint_page`` that of a server, and ``simulation_page`` shows drafting and
verifying on different workers.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from markupsafe import Markup
from pydantic import TypeAdapter

from foretoken.costs.measured import PassCost, TimeSpread
from foretoken.plan.candidates import PlanRow
from foretoken.plan.endpoint.outcome import EndpointPlan, EndpointRow, verdict_lines
from foretoken.plan.exports import NAMES
from foretoken.plan.outcome import Choice, Plan
from foretoken.plan.predictors import CONSTANT, Predictor
from foretoken.plan.simulator import SWEEPS, DraftingOption, SimulationResult, Sweep
from foretoken.report.charts import Axis, Bar, Point, Series, bars, lines
from foretoken.report.document import figure, interval, render, times

ENGINES = NAMES | {"foretoken": "Foretoken", "vllm": "vLLM, as its speculative_config"}
Cells = tuple[str, ...]
Setting = tuple[float, int]  # temperature, batch
AnyRow = TypeVar("AnyRow", PlanRow, EndpointRow)


def page(plan: Plan, exports: Mapping[str, Any], conditional: bool = False) -> str:
    """Returns an HTML document.

    exports: the best configuration in the form of each engine, empty if there is none. conditional: whether acceptance
    is given that of the positions before, see ``PlanRow.acceptance``.
    """
    groups: dict[Setting, list[PlanRow]] = {}
    for row in plan.rows:
        groups.setdefault((row.temperature, row.batch), []).append(row)
    accepted = "accepted, given those before" if conditional else "share of steps accepted so deep"
    return render(
        "plan.jinja",
        plan.setting,
        verdict=_verdict(plan),
        depths=[_depths(rows, key) for key, rows in groups.items()],
        exports=[(ENGINES[name], _pasted(form)) for name, form in exports.items() if form],
        tables=[(_named(key), *_by_speedup(rows, _cells)) for key, rows in groups.items()],
        estimates=plan.remote_drafting,
        option_speedup=_option_speedup,
        positions=[_positions(rows, key, accepted) for key, rows in groups.items()],
        costs=_costs(plan.costs),
        predictors=[_predictors(*at, predictors) for at, predictors in plan.predictors.items()],
    )


def from_record(record: Mapping[str, Any]) -> str:
    """Returns the HTML document of a record that ``plan --output`` wrote, not one of ``--endpoint``."""
    predictors: dict[tuple[str, float], list[Any]] = {}
    for predictor in record["predictors"]:
        predictors.setdefault((predictor["draft"], predictor["temperature"]), []).append(predictor)
    rows = [{key: math.nan if value is None else value for key, value in row.items()} for row in record["rows"]]
    facts = {**record, "rows": rows, "choices": (), "predictors": predictors}
    plan = TypeAdapter(Plan).validate_python(facts)
    plan = replace(plan, choices=Plan.of(plan.rows).choices)
    return page(plan, record["exports"] or {}, conditional=record.get("engine") == "vllm")


def _speedups(
    title: str,
    rows: Iterable[AnyRow],
    x: str,
    point: Callable[[AnyRow], tuple[float, str]],
    name: Callable[[AnyRow], str] = lambda row: row.name,
) -> Markup:
    """Returns a chart of speedups over plain decoding.

    x: label of the horizontal axis. point: returns a row's value on it, and additional text. name: of a row's line.
    """
    points: dict[str, list[Point]] = {}
    for row in rows:
        at, note = point(row)
        points.setdefault(name(row), []).append(Point(at, row.speedup or math.nan, row.low, row.high, note))
    series = [Series(proposer, tuple(sorted(line, key=lambda point: point.x))) for proposer, line in points.items()]
    plain = "The dashed line is plain decoding."
    return lines(title, series, Axis(x), Axis("speedup over plain", zero=True), level=1.0, note=plain)


def _by_speedup(rows: Iterable[AnyRow], cells: Callable[[AnyRow], Cells]) -> tuple[list[Cells], list[int]]:
    """Returns the cells of the rows from the fastest on, and the indices of the best."""
    ordered = sorted(rows, key=lambda row: row.speedup or 0.0, reverse=True)
    return [cells(row) for row in ordered], [i for i, row in enumerate(ordered) if row.best]


def _named(setting: Setting) -> str:
    return f"temperature {setting[0]:g}, batch {setting[1]}"


def _verdict(plan: Plan) -> tuple[str, str, list[str]]:
    """Returns the tone, the recommendation over everything, and that for each temperature and batch."""
    details, best = [_choice(choice) for choice in plan.choices], plan.best
    if best is None:
        return "bad", "Do not speculate: plain decoding is faster over all of this", details
    name = next(row.name for row in plan.rows if row.config == best)
    sure = all(choice.sure and choice.row is not None for choice in plan.choices)
    depth = best["num_speculative_tokens"]
    return "good" if sure else "open", f"Speculate with {name}, {depth} draft tokens per step", details


def _choice(choice: Choice) -> str:
    where, row = _named((choice.temperature, choice.batch)).capitalize(), choice.row
    if row is None:
        return f"{where}: do not speculate" + ("" if choice.sure else ", though the intervals leave it open")
    span, doubt = interval(row.low, row.high), "" if choice.sure else "; its interval includes 1"
    span = f" ({span})" if span else ""
    return f"{where}: {times(row.speedup)}{span} with {row.name}, {row.num_speculative_tokens} draft tokens{doubt}"


def _depths(rows: Sequence[PlanRow], setting: Setting) -> Markup:
    def point(row: PlanRow) -> tuple[float, str]:
        return row.num_speculative_tokens, f"{figure(row.tokens_per_pass)} tokens per pass"

    return _speedups(_named(setting).capitalize(), rows, "draft tokens per step", point)


def _cells(row: PlanRow) -> Cells:
    return (
        *(row.name, str(row.num_speculative_tokens), times(row.speedup), interval(row.low, row.high)),
        *(times(row.end_to_end), *_tokens_per_pass(row)),
        figure(row.step_seconds * 1e3),
    )


def _tokens_per_pass(row: PlanRow | EndpointRow) -> tuple[str, str]:
    return figure(row.tokens_per_pass), interval(row.tokens_per_pass_low, row.tokens_per_pass_high)


def _option_speedup(option: DraftingOption) -> str:
    return times(option.speedup) + ("" if option.depth is None else f" ({option.depth})")


def _pasted(form: object) -> str:
    return form if isinstance(form, str) else json.dumps(form, ensure_ascii=False, default=str)


def _positions(rows: Sequence[PlanRow], setting: Setting, label: str) -> Markup:
    """Acceptance by position of every proposer's longest draft. label: name of the figures."""
    longest: dict[str, tuple[float, ...]] = {}
    for row in rows:
        if len(row.acceptance) > len(longest.get(row.name, ())):
            longest[row.name] = row.acceptance
    if not longest:
        return Markup()
    series = [Series(name, tuple(map(Point, range(1, len(rates) + 1), rates))) for name, rates in longest.items()]
    y = Axis(label, zero=True, high=1.0)
    return lines(_named(setting).capitalize(), series, Axis("position in the draft"), y)


def _costs(costs: Mapping[str, Sequence[PassCost]]) -> list[Markup]:
    """A chart of the passes of each model and batch."""
    charts: dict[tuple[str, int], list[PassCost]] = {}
    for name, passes in costs.items():
        for cost in passes:
            charts.setdefault((name, cost.batch), []).append(cost)
    return [_cost_curves(name, batch, passes) for (name, batch), passes in charts.items()]


def _cost_curves(name: str, batch: int, passes: Sequence[PassCost]) -> Markup:
    """A line for each context. The limit by memory bandwidth, bare matrix products, does not depend on the context."""
    groups: dict[int, list[PassCost]] = {}
    for cost in sorted(passes, key=lambda cost: (cost.context, cost.rows)):
        groups.setdefault(cost.context, []).append(cost)
    series = [
        Series(f"{context:,} tokens of context", tuple(_cost_point(cost.rows, cost.seconds) for cost in costs))
        for context, costs in groups.items()
    ]
    limits = [(cost.rows, cost.floor) for cost in next(iter(groups.values())) if cost.floor is not None]
    if limits:
        points = tuple(Point(rows, 1e3 * limit.median) for rows, limit in limits)
        series.append(Series("bare matrix products", points, reference=True))
    sizes = tuple(sorted({float(cost.rows) for cost in passes}))
    return lines(
        name + (f", batch {batch}" if batch > 1 else ""),
        series,
        Axis("rows of a pass", zero=True, at=sizes if len(sizes) <= 6 else ()),
        Axis("ms per pass", zero=True),
        note="Medians, shaded from the fastest to the slowest run. Curves are jagged: nothing is fitted.",
    )


def _cost_point(rows: int, seconds: TimeSpread) -> Point:
    return Point(rows, 1e3 * seconds.median, 1e3 * seconds.low, 1e3 * seconds.high)


def _predictors(draft: str, temperature: float, predictors: Sequence[Predictor]) -> tuple[Markup, Sequence[Predictor]]:
    """Returns a chart for a draft and temperature, and its predictors, the most accurate first."""
    ordered = sorted(predictors, key=lambda predictor: predictor.error)
    items = [Bar(one.name, 100 * one.error, kind="theirs" if one.name == CONSTANT else "ours") for one in ordered]
    note = "Error of the predicted acceptance, in points"
    return bars(f"{draft} at temperature {temperature:g}", items, "points of error", note=note), ordered


def endpoint_page(plan: EndpointPlan) -> str:
    """Returns an HTML document."""
    groups: dict[int, list[EndpointRow]] = {}
    for row in plan.rows:
        groups.setdefault(row.concurrency, []).append(row)
    return render(
        "endpoint.jinja",
        verdict=_endpoint_verdict(plan),
        depths=[_by_depth(rows, count) for count, rows in groups.items()],
        concurrencies=_by_concurrency(plan.rows),
        paste=plan.paste,
        tables=[(count, *_by_speedup(rows, _endpoint_cells)) for count, rows in groups.items()],
        measured={key: value for key, value in plan.facts.items() if not isinstance(value, Mapping)},
    )


def _endpoint_verdict(plan: EndpointPlan) -> tuple[str, str, Sequence[str]]:
    if plan.choice is None:
        return "open", f"Cannot tell, because {plan.because}", plan.notes
    headline, *details = verdict_lines(plan.choice, plan.rows)
    return "good" if plan.choice.sure else "open", headline, [*details, *plan.notes]


def _kind(row: EndpointRow) -> str:
    return "measured" if row.measured else "predicted"


def _by_depth(rows: Sequence[EndpointRow], concurrency: int) -> Markup:
    usable = [row for row in rows if row.speedup is not None]
    if not usable:
        return Markup()
    return _speedups(f"{concurrency} at once", usable, "draft tokens per pass", lambda row: (row.depth, _kind(row)))


def _by_concurrency(rows: Sequence[EndpointRow]) -> Markup:
    """The server's own drafter at the draft lengths that were measured."""
    depths = [row.depth for row in rows if row.measured]
    usable = [row for row in rows if row.config is None and row.depth in depths]
    if not depths:
        return Markup()

    def point(row: EndpointRow) -> tuple[float, str]:
        return row.concurrency, _kind(row)

    return _speedups(
        "Measured draft lengths", usable, "requests at once", point, lambda row: f"{row.depth} draft tokens"
    )


def _endpoint_cells(row: EndpointRow) -> Cells:
    return (
        *(row.name, f"{row.depth}{'*' if row.measured else ''}", times(row.speedup)),
        *(interval(row.low, row.high), *_tokens_per_pass(row)),
        figure(row.tokens_per_second),
    )


def simulation_page(
    setting: Mapping[str, Any], result: Sequence[SimulationResult] | Sweep, verdict: str, profitable: bool
) -> str:
    """Returns an HTML document: the speedup of each strategy, by the value that was varied if one was."""
    if isinstance(result, Sweep):
        kind = SWEEPS[result.by]
        pairs = zip(result.values, result.outcomes, strict=True)
        tables = [(f"{kind.label} {value * kind.scale:g}", rows) for value, rows in pairs]
        chart = _curves(result)
    else:
        tables, chart = [("Figures", tuple(result))], _bars(result)
    best = [max(range(len(rows)), key=lambda at: rows[at].over_plain) for _, rows in tables]
    return render(
        "simulate.jinja",
        setting,
        verdict=("good" if profitable else "open", verdict),
        chart=chart,
        tables=[(name, rows, top) for (name, rows), top in zip(tables, best, strict=True)],
    )


def _curves(swept: Sweep) -> Markup:
    kind = SWEEPS[swept.by]
    points: dict[str, list[Point]] = {}
    for value, outcomes in zip(swept.values, swept.outcomes, strict=True):
        for outcome in outcomes:
            points.setdefault(outcome.strategy, []).append(Point(value * kind.scale, outcome.over_plain))
    series = [Series(name, tuple(line), reference=name == "plain") for name, line in points.items()]
    y = Axis("speedup over plain", zero=True)
    return lines(f"Over plain decoding, by {kind.label}", series, Axis(kind.label), y, level=1)


def _bars(outcomes: Sequence[SimulationResult]) -> Markup:
    items = [
        Bar(outcome.strategy, outcome.over_plain, kind="theirs" if outcome.strategy == "plain" else "ours")
        for outcome in outcomes
    ]
    return bars("Over plain decoding", items, "speedup over plain", level=1.0)
