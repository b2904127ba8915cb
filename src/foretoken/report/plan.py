"""A plan's record as a page: what speculation would gain, with what, how sure that is, and what to paste."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.report.axes import Axis
from foretoken.report.charts import Bar, Point, Series, bars, lines
from foretoken.report.costs import curves, milliseconds
from foretoken.report.document import bullets, document, folded, grid, paragraph, said, section, table
from foretoken.report.markup import Html, element, figure, join, number, percent, times
from foretoken.report.prediction import against
from foretoken.report.records import mappings, record, shown

SHOWN = 12  # rows of a table before the rest is folded away
ENGINES = {"foretoken": "Foretoken", "vllm": "vLLM, as its speculative_config", "transformers": "transformers"}
Row = Mapping[str, Any]
Place = tuple[float, int]  # temperature, batch


def page(plan: Mapping[str, Any]) -> str:
    """A whole document. plan: ``Plan.to_dict()``; "measured", if there, has ``prediction.page``'s rows."""
    rows = mappings(plan.get("rows"))
    places = list(dict.fromkeys(map(_place, rows)))
    return document(
        "What speculation would gain here",
        [
            _verdict(plan, rows),
            section("Speed-up by depth", grid(*(_depths(rows, p) for p in places))),
            section("What to paste", *_pastes(record(plan.get("exports")))),
            *(_table([row for row in rows if _place(row) == place], place) for place in places),
            section("Drafting on another machine, simulated", *_elsewhere(mappings(plan.get("remote_drafting")))),
            section("Acceptance by position", grid(*(_positions(rows, p) for p in places))),
            section("What a pass costs", curves(mappings(plan.get("costs")))),
            section("Which cheap statistics foretell acceptance", *_predictors(record(plan.get("predictors")))),
            section("Predicted against measured", against(mappings(plan.get("measured")))),
        ],
        record(plan.get("setting")),
        lead="Speed-ups are over plain decoding on this machine, predicted from the target's own continuations of the "
        "prompts and from rounds that were timed. Of 100 further runs over as many requests, 95 should lie inside the "
        "intervals.",
        footer="tokens/pass: emitted tokens over target passes, the target's own token included. A speed-up of 1 is "
        "plain decoding. Exactness is the same everywhere: whatever is chosen, the text has the target's distribution.",
    )


def _place(row: Row) -> Place:
    return number(row.get("temperature")) or 0.0, int(number(row.get("batch")) or 1)


def _named(place: Place) -> str:
    return f"temperature {place[0]:g}, batch {place[1]}"


def _gain(row: Row) -> float:
    return number(row.get("speedup")) or 0.0


def _name(row: Row) -> str:
    return str(row.get("name") or row.get("method") or "?")


def _drafts(row: Row) -> str:
    return shown(row.get("num_speculative_tokens"))


def _span(row: Row, low: str = "low", high: str = "high") -> str:
    below, above = number(row.get(low)), number(row.get(high))
    return "" if below is None or above is None else f"{below:.2f}–{above:.2f}"


def _verdict(plan: Mapping[str, Any], rows: Sequence[Row]) -> Html:
    """What to do about everything that was asked, and about each temperature and batch."""
    choices, best = mappings(plan.get("choices")), plan.get("best")
    told = bullets(_choice(choice) for choice in choices)
    if not best:
        return said("bad", "Do not speculate: plain decoding is faster over all of this", told)
    name = next((_name(row) for row in rows if row.get("config") == best), record(best).get("method", "?"))
    sure = all(choice.get("sure") and choice.get("speculate") for choice in choices)
    headline = f"Speculate with {name}, {_drafts(record(best))} drafted tokens a round"
    return said("good" if sure else "open", headline, told)


def _choice(choice: Mapping[str, Any]) -> str:
    where, row, sure = _named(_place(choice)).capitalize(), record(choice.get("row")), bool(choice.get("sure"))
    if not row:
        return f"{where}: do not speculate" + ("" if sure else ", though the intervals leave it open")
    doubt = "" if sure else "; its interval leaves open whether it gains at all"
    span = f" ({_span(row)})" if _span(row) else ""
    return f"{where}: {times(number(row.get('speedup')))}{span} with {_name(row)}, {_drafts(row)} drafted tokens{doubt}"


def _depths(rows: Sequence[Row], place: Place) -> Html:
    mine = [row for row in rows if _place(row) == place]
    series = [
        Series(name, tuple(sorted((_point(row) for row in mine if _name(row) == name), key=lambda p: p.x)))
        for name in dict.fromkeys(map(_name, mine))
    ]
    return lines(
        _named(place).capitalize(),
        series,
        Axis("drafted tokens a round"),
        Axis("speed-up over plain", zero=True),
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
    """The fastest rows, and behind a fold all of them."""
    ordered = sorted(rows, key=_gain, reverse=True)
    heads = ("proposer", "drafts", "speed-up", "95 %", "with prompts", "tokens/pass", "95 %", "ms a round")
    cells = [
        (
            _name(row), _drafts(row), times(number(row.get("speedup"))), _span(row),
            times(number(row.get("end_to_end"))), figure(number(row.get("tokens_per_pass"))),
            _span(row, "tokens_per_pass_low", "tokens_per_pass_high"), milliseconds(row.get("step_seconds")),
        )
        for row in ordered
    ]  # fmt: skip
    best = [at for at, row in enumerate(ordered) if row.get("best") is True]
    rest = folded(f"All {len(cells)} rows", table(heads, cells, best)) if len(cells) > SHOWN else ""
    return section(f"Predictions at {_named(place)}", table(heads, cells[:SHOWN], best), rest) if rows else Html()


def _elsewhere(found: Sequence[Mapping[str, Any]]) -> list[Html]:
    """Every way to use a draft model that is a round trip away, beside drafting here."""
    if not found:
        return []
    ways = [mappings(each.get("options")) for each in found]
    heads = ("draft", "temperature", "round trip, ms", *(_where(way) for way in ways[0]))
    cells = [
        (each.get("name"), figure(number(each.get("temperature"))), figure(1e3 * (number(each.get("rtt")) or 0.0)),
         *(_used(way) for way in own))
        for each, own in zip(found, ways, strict=True)
    ]  # fmt: skip
    return [table(heads, cells), bullets(str(each.get("verdict", "")) for each in found)]


def _where(way: Mapping[str, Any]) -> str:
    return "here" if way.get("strategy") == "local" else str(way.get("strategy"))


def _used(way: Mapping[str, Any]) -> str:
    depth = way.get("depth")
    return times(number(way.get("speedup"))) + ("" if depth is None else f" ({depth})")


def _pastes(exports: Mapping[str, Any]) -> list[Html]:
    """The configuration for everything that was asked, ours and what other engines call it."""
    return [_pasted(ENGINES.get(engine, engine), form) for engine, form in exports.items() if form]


def _pasted(engine: str, form: Any) -> Html:
    code = form if isinstance(form, str) else json.dumps(form, ensure_ascii=False, default=str)
    return join(paragraph(engine, note=True), element("pre", element("code", code), tabindex=0))


def _positions(rows: Sequence[Row], place: Place) -> Html:
    """Of every proposer the row that drafts deepest."""
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
    accepted = Axis("share accepted so far down", zero=True, high=1.0)
    return lines(_named(place).capitalize(), series, Axis("position in the draft"), accepted)


def _accepted(row: Row) -> list[float]:
    values = row.get("acceptance")
    if not isinstance(values, Sequence) or isinstance(values, str):
        return []
    return [value for value in map(number, values) if value is not None]


def _predictors(found: Mapping[str, Any]) -> list[Html]:
    charts = [_errors(str(name), mappings(each)) for name, each in found.items() if mappings(each)]
    if not charts:
        return []
    about = paragraph(
        "Each is fitted to these requests; its error is that of foretelling the acceptance of a request left out of "
        "the fit. One that is no better than the constant, which foretells the mean, is of no use here."
    )
    return [about, grid(*charts)]


def _errors(name: str, found: Sequence[Mapping[str, Any]]) -> Html:
    ordered = sorted(found, key=lambda one: number(one.get("error")) or math.inf)
    points = [(str(one.get("name", "")), number(one.get("error"))) for one in ordered]
    items = [Bar(word, math.nan if error is None else error * 100, kind=_kind(word)) for word, error in points]
    rows = [
        (word, _signed(one.get("correlation")), percent(error))
        for (word, error), one in zip(points, ordered, strict=True)
    ]
    figures = folded("Correlations", table(("statistic", "correlation", "error"), rows))
    return element(
        "div", bars(name, items, "points of error", note="Error of the acceptance foretold, in points"), figures
    )


def _kind(name: str) -> str:
    return "theirs" if name == "constant" else "ours"


def _signed(value: Any) -> str:
    known = number(value)
    return "–" if known is None else f"{known:+.2f}"
