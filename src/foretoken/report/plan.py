"""HTML page of a plan: predicted speedups with intervals, the recommendation, and the configuration to paste."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.report.axes import Axis
from foretoken.report.charts import Bar, Point, Series, bars, lines
from foretoken.report.costs import curves, milliseconds
from foretoken.report.document import bullets, document, folded, grid, paragraph, section, table, verdict
from foretoken.report.markup import Html, element, figure, join, number, percent, times
from foretoken.report.prediction import against
from foretoken.report.records import mappings, record, shown

SHOWN = 12  # rows of a table outside of its fold
ENGINES = {"foretoken": "Foretoken", "vllm": "vLLM, as its speculative_config", "transformers": "transformers"}
Row = Mapping[str, Any]
Place = tuple[float, int]  # temperature, batch


def page(plan: Mapping[str, Any]) -> str:
    """Returns an HTML document.

    Args:
        plan: ``Plan.to_dict()``. Its optional key "measured" holds rows as of ``prediction.page``.
    """
    rows = mappings(plan.get("rows"))
    places = list(dict.fromkeys(map(_place, rows)))
    conditional = plan.get("engine") == "vllm"  # see ``PlanRow.acceptance``
    accepted = "accepted, given those before" if conditional else "share of steps accepted so deep"
    return document(
        "Speedup of speculation here",
        [
            _verdict(plan, rows),
            section("Speedup by draft length", grid(*(_depths(rows, p) for p in places))),
            section("Configuration to paste", *_pastes(record(plan.get("exports")))),
            *(_table([row for row in rows if _place(row) == place], place) for place in places),
            section("Drafting on another machine, simulated", *_remote_drafting(mappings(plan.get("remote_drafting")))),
            section("Acceptance by position", grid(*(_positions(rows, p, accepted) for p in places))),
            section("Cost of a forward pass", curves(record(plan.get("costs")))),
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


def _place(row: Row) -> Place:
    return number(row.get("temperature")) or 0.0, int(number(row.get("batch")) or 1)


def _named(place: Place) -> str:
    return f"temperature {place[0]:g}, batch {place[1]}"


def _speedup(row: Row) -> float:
    return number(row.get("speedup")) or 0.0


def _name(row: Row) -> str:
    return str(row.get("name") or row.get("method") or "?")


def _drafts(row: Row) -> str:
    return shown(row.get("num_speculative_tokens"))


def _span(row: Row, low: str = "low", high: str = "high") -> str:
    below, above = number(row.get(low)), number(row.get(high))
    return "" if below is None or above is None else f"{below:.2f}–{above:.2f}"


def _verdict(plan: Mapping[str, Any], rows: Sequence[Row]) -> Html:
    """The recommendation over everything, and for each temperature and batch."""
    choices, best = mappings(plan.get("choices")), plan.get("best")
    details = bullets(_choice(choice) for choice in choices)
    if not best:
        return verdict("bad", "Do not speculate: plain decoding is faster over all of this", details)
    name = next((_name(row) for row in rows if row.get("config") == best), record(best).get("method", "?"))
    sure = all(choice.get("sure") and choice.get("speculate") for choice in choices)
    headline = f"Speculate with {name}, {_drafts(record(best))} draft tokens per step"
    return verdict("good" if sure else "open", headline, details)


def _choice(choice: Mapping[str, Any]) -> str:
    where, row, sure = _named(_place(choice)).capitalize(), record(choice.get("row")), bool(choice.get("sure"))
    if not row:
        return f"{where}: do not speculate" + ("" if sure else ", though the intervals leave it open")
    doubt = "" if sure else "; its interval includes 1"
    span = f" ({_span(row)})" if _span(row) else ""
    return f"{where}: {times(number(row.get('speedup')))}{span} with {_name(row)}, {_drafts(row)} draft tokens{doubt}"


def _depths(rows: Sequence[Row], place: Place) -> Html:
    here = [row for row in rows if _place(row) == place]
    series = [
        Series(name, tuple(sorted((_point(row) for row in here if _name(row) == name), key=lambda p: p.x)))
        for name in dict.fromkeys(map(_name, here))
    ]
    return lines(
        _named(place).capitalize(),
        series,
        Axis("draft tokens per step"),
        Axis("speedup over plain", zero=True),
        level=1.0,
        note="The dashed line is plain decoding.",
    )


def _point(row: Row) -> Point:
    depth = number(row.get("num_speculative_tokens"))
    return Point(
        math.nan if depth is None else depth,
        number(row.get("speedup")) or math.nan,
        number(row.get("low")),
        number(row.get("high")),
        f"{figure(number(row.get('tokens_per_pass')))} tokens per pass",
    )


def _table(rows: Sequence[Row], place: Place) -> Html:
    """The fastest rows, and all of them in a fold."""
    ordered = sorted(rows, key=_speedup, reverse=True)
    heads = ("proposer", "drafts", "speedup", "95 %", "with prompts", "tokens/pass", "95 %", "ms per step")
    cells = [
        (
            _name(row),
            _drafts(row),
            times(number(row.get("speedup"))),
            _span(row),
            times(number(row.get("end_to_end"))),
            figure(number(row.get("tokens_per_pass"))),
            _span(row, "tokens_per_pass_low", "tokens_per_pass_high"),
            milliseconds(row.get("step_seconds")),
        )
        for row in ordered
    ]
    best = [at for at, row in enumerate(ordered) if row.get("best") is True]
    rest = folded(f"All {len(cells)} rows", table(heads, cells, best)) if len(cells) > SHOWN else ""
    return section(f"Predictions at {_named(place)}", table(heads, cells[:SHOWN], best), rest) if rows else Html()


def _remote_drafting(estimates: Sequence[Mapping[str, Any]]) -> list[Html]:
    """Speedups of a draft model on another machine, beside drafting here."""
    if not estimates:
        return []
    options = [mappings(each.get("options")) for each in estimates]
    heads = ("draft", "temperature", "round trip, ms", *map(_strategy, options[0]))
    cells = [
        (
            each.get("name"),
            figure(number(each.get("temperature"))),
            figure(1e3 * (number(each.get("rtt")) or 0.0)),
            *map(_option_speedup, own),
        )
        for each, own in zip(estimates, options, strict=True)
    ]
    return [table(heads, cells), bullets(str(each.get("verdict", "")) for each in estimates)]


def _strategy(option: Mapping[str, Any]) -> str:
    return "here" if option.get("strategy") == "local" else str(option.get("strategy"))


def _option_speedup(option: Mapping[str, Any]) -> str:
    depth = option.get("depth")
    return times(number(option.get("speedup"))) + ("" if depth is None else f" ({depth})")


def _pastes(exports: Mapping[str, Any]) -> list[Html]:
    """The best configuration in the form of each engine."""
    return [_pasted(ENGINES.get(engine, engine), form) for engine, form in exports.items() if form]


def _pasted(engine: str, form: Any) -> Html:
    code = form if isinstance(form, str) else json.dumps(form, ensure_ascii=False, default=str)
    return join(paragraph(engine, note=True), element("pre", element("code", code), tabindex=0))


def _positions(rows: Sequence[Row], place: Place, label: str) -> Html:
    """Acceptance by position of every proposer's longest draft. label: what the figures are."""
    deepest: dict[str, Row] = {}
    for row in rows:
        if _place(row) == place and _accepted(row):
            known = deepest.get(_name(row))
            if known is None or len(_accepted(row)) > len(_accepted(known)):
                deepest[_name(row)] = row
    series = [
        Series(name, tuple(Point(at, rate) for at, rate in enumerate(_accepted(row), 1)))
        for name, row in deepest.items()
    ]
    if not series:
        return Html()
    return lines(_named(place).capitalize(), series, Axis("position in the draft"), Axis(label, zero=True, high=1.0))


def _accepted(row: Row) -> list[float]:
    values = row.get("acceptance")
    if not isinstance(values, Sequence) or isinstance(values, str):
        return []
    return [value for value in map(number, values) if value is not None]


def _predictors(predictors: Sequence[Mapping[str, Any]]) -> list[Html]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in predictors:
        name = f"{one.get('draft')} at temperature {number(one.get('temperature')) or 0.0:g}"
        groups.setdefault(name, []).append(one)
    if not groups:
        return []
    about = paragraph(
        "Each is fitted to these requests. Its error is that of predicting the acceptance of a request left out of the "
        "fit. A statistic that is no better than the constant, which predicts the mean, is of no use here."
    )
    return [about, grid(*(_errors(name, group) for name, group in groups.items()))]


def _errors(name: str, predictors: Sequence[Mapping[str, Any]]) -> Html:
    ordered = sorted(predictors, key=lambda one: number(one.get("error")) or math.inf)
    points = [(str(one.get("name", "")), number(one.get("error"))) for one in ordered]
    items = [Bar(word, math.nan if error is None else error * 100, kind=_kind(word)) for word, error in points]
    rows = [
        (word, _signed(one.get("correlation")), percent(error))
        for (word, error), one in zip(points, ordered, strict=True)
    ]
    figures = folded("Correlations", table(("statistic", "correlation", "error"), rows))
    return element(
        "div",
        bars(name, items, "points of error", note="Error of the predicted acceptance, in points"),
        figures,
    )


def _kind(name: str) -> str:
    return "theirs" if name == "constant" else "ours"


def _signed(value: Any) -> str:
    known = number(value)
    return "–" if known is None else f"{known:+.2f}"
