"""HTML page of an audit: the verdict, each check with its evidence and power, and where texts diverge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.report.charts import Bar, bars
from foretoken.report.document import (
    badge,
    cards,
    document,
    facts,
    folded,
    grid,
    paragraph,
    section,
    table,
    verdict,
    wrapped,
)
from foretoken.report.markup import Html, element, figure, join, mappings, number, percent, record, shown, signed

TONES = {"passed": "good", "failed": "bad", "inconclusive": "open"}
HEADLINES = {"passed": "Exact, as far as it was tested", "failed": "Not exact", "inconclusive": "Inconclusive"}
MAX_ZEROS = 16.0  # largest -log10 of a p-value on a chart


def page(audit: Mapping[str, Any]) -> str:
    """Returns an HTML document. audit: ``Audit.to_dict()``."""
    outcome, checks = str(audit.get("outcome", "inconclusive")), mappings(audit.get("checks"))
    summary = str(audit.get("summary", ""))
    return document(
        "Is this speculation exact?",
        [
            verdict(TONES.get(outcome, ""), HEADLINES.get(outcome, outcome), paragraph(summary)),
            _cards(checks, audit),
            section("Checks", _overview(checks)),
            *(_check(check) for check in checks),
            facts(record(audit.get("subject")), "What was audited"),
        ],
        record(audit.get("setting")),
        lead=_subject(record(audit.get("subject"))),
        footer="A check that passed found no error, and states which errors it would have found. The negative control "
        "plants an error and must find it, else nothing passed. Together, statistical checks call an exact "
        "implementation wrong with a probability of one in a thousand.",
    )


def _subject(subject: Mapping[str, Any]) -> str:
    names = [shown(subject[key]).rpartition("/")[2] for key in ("model", "draft_model") if subject.get(key)]
    how = [shown(subject[key]) for key in ("engine", "method") if subject.get(key)]
    return ": ".join(part for part in (", ".join(how), " with ".join(names)) if part)


def _cards(checks: Sequence[Mapping[str, Any]], audit: Mapping[str, Any]) -> Html:
    counted = [(sum(check.get("outcome") == name for check in checks), name) for name in ("passed", "failed")]
    tokens = sum(int(number(record(check.get("numbers")).get("tokens")) or 0) for check in checks)
    finds = [
        number(one.get("finds")) for one in _statistics(checks) if one.get("what") == "probability moved between ranks"
    ]
    smallest = min((value for value in finds if value is not None), default=None)
    figures: list[tuple[object, object]] = [(count, f"checks {name}") for count, name in counted]
    figures.append((f"{tokens:,}", "tokens tested"))
    if smallest is not None:
        figures.append((percent(smallest), "of probability moved would have been found"))
    return cards([*figures, (f"{figure(number(audit.get('seconds')))} s", "taken")])


def _statistics(checks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [one for check in checks for one in mappings(record(check.get("numbers")).get("statistics"))]


def _overview(checks: Sequence[Mapping[str, Any]]) -> Html:
    rows = [
        (
            check.get("name", ""),
            element("td", _badge(check), class_="name"),
            wrapped(str(check.get("evidence", ""))),
            f"{figure(number(check.get('seconds')), 2)} s",
        )
        for check in checks
    ]
    return table(("check", "verdict", "evidence", "took"), rows, names=3, stack=True)


def _badge(check: Mapping[str, Any]) -> Html:
    outcome = str(check.get("outcome", ""))
    return badge(TONES.get(outcome, ""), outcome)


def _check(check: Mapping[str, Any]) -> Html:
    """Returns a section of everything a check recorded: charts and tables of known entries, a list of the others."""
    numbers = record(check.get("numbers"))
    parts = [draw(numbers) for key, draw in _DRAWN.items() if key in numbers]
    rest = {key: value for key, value in numbers.items() if key not in _DRAWN}
    about = facts({key: shown(value) for key, value in rest.items()}, title="")
    if not any(parts) and not rest:
        return Html()
    return section(join(check.get("name", ""), " ", _badge(check)), paragraph(check.get("evidence", "")), *parts, about)


def _surprises(numbers: Mapping[str, Any]) -> Html:
    """Every statistic's p-value in powers of ten beside the level, and its power."""
    statistics = mappings(numbers.get("statistics"))
    if not statistics:
        return Html()
    groups: dict[str, list[Bar]] = {}
    for one in statistics:
        group, _, name = str(one.get("name", "")).rpartition(": ")
        groups.setdefault(group, []).append(Bar(name, _powers(one.get("p_value"))))
    level = _powers(numbers.get("level"))
    limit = None if math.isnan(level) else level
    charts = [bars(group or "statistics", items, "zeros of p", level=limit) for group, items in groups.items()]
    rows = [
        (
            one.get("name", ""),
            f"G = {figure(number(one.get('value')))} on {one['dof']}"
            if one.get("dof")
            else f"z = {signed(one.get('value'))}",
            figure(number(one.get("p_value")), 2),
            _finds(one),
        )
        for one in statistics
    ]
    return join(
        element("h3", "P-values"),
        paragraph(_NOTE, note=True),
        grid(*charts),
        folded("Every statistic, with its power", table(("statistic", "value", "p", "would find"), rows)),
    )


_NOTE = "Each unit is a factor of ten: 1 is one in ten. A bar that reaches the dashed line is an error."


def _powers(p: Any) -> float:
    value = number(p)
    if value is None:
        return math.nan
    return MAX_ZEROS if value <= 10.0**-MAX_ZEROS else -math.log10(min(1.0, value))


def _finds(one: Mapping[str, Any]) -> str:
    size, what = number(one.get("finds")), str(one.get("what", ""))
    if size is None:
        return "–"
    return f"{figure(size, 2)} {what}" if what.startswith("nats") else f"{percent(size)} {what}"


def _plants(numbers: Mapping[str, Any]) -> Html:
    rows = []
    for one in mappings(numbers.get("plants")):
        detected_by = record(one.get("found"))
        how = ", ".join(f"{name} ({figure(number(z))})" for name, z in detected_by.items())
        if one.get("impossible"):
            how = f"{one['impossible']} tokens of probability 0" + (f", {how}" if how else "")
        needed = number(one.get("needed"))
        missed = "not found" + (f"; about {needed:,.0f} tokens would show it" if needed else "")
        seen = badge("good", "found") if how else badge("open", "not found")
        tokens = f"{int(number(one.get('tokens')) or 0):,}"
        rows.append(
            (wrapped(str(one.get("error", ""))), element("td", seen, class_="name"), wrapped(how or missed), tokens)
        )
    return table(("planted error", "", "by", "tokens"), rows, names=3)


def _divergences(numbers: Mapping[str, Any]) -> Html:
    divergences = mappings(numbers.get("divergences"))
    rows = [
        (
            int(number(one.get("prompt")) or 0) + 1,
            int(number(one.get("position")) or 0) + 1,
            figure(number(one.get("margin"))),
            figure(number(one.get("moved"))),
            one.get("kind") or ("a tie" if one.get("tie") else "not a tie"),
        )
        for one in divergences
    ]
    heads = ("prompt", "token", "best two apart", "passes apart", "verdict")
    texts = [
        _divergence(one) for one in divergences if one.get("plain") is not None and one.get("speculative") is not None
    ]
    return join(element("h3", "Where texts diverge"), table(heads, rows, names=0), *texts[:5]) if rows else Html()


def _divergence(one: Mapping[str, Any]) -> Html:
    """Both texts, with everything after their common prefix marked."""
    plain, other = str(one["plain"]), str(one["speculative"])
    common = next(
        (i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other))
    )

    def marked(title: str, text: str) -> Html:
        return element("div", element("h4", title), element("pre", text[:common], element("mark", text[common:])))

    where = f"Prompt {int(number(one.get('prompt')) or 0) + 1}, token {int(number(one.get('position')) or 0) + 1}"
    return folded(
        where, element("div", marked("plain", plain), marked("with speculation", other), class_="texts"), open_=True
    )


def _fits(numbers: Mapping[str, Any]) -> Html:
    rows = [
        (
            at,
            figure(number(one.get("g"))),
            one.get("dof", ""),
            figure(number(one.get("p_value")), 2),
            percent(one.get("finds")),
        )
        for at, one in enumerate(mappings(numbers.get("fits")), 1)
    ]
    return table(("prompt", "G", "degrees of freedom", "p", "would find, moved"), rows, names=0)


def _parameters(numbers: Mapping[str, Any]) -> Html:
    """Treatment of each parameter by an endpoint, without speculation and with it."""
    rows = [
        (one.get("parameter", ""), _treatment(one.get("plain")), _treatment(one.get("speculative")), wrapped(how))
        for one in mappings(numbers.get("parameters"))
        for how in [str(one.get("how", ""))]
    ]
    heads = ("parameter", "plain", "with speculation", "seen")
    return table(heads, rows, names=4, stack=True)


def _treatment(word: Any) -> Html:
    tones = {"honoured": "good", "ignored": "bad", "something else": "bad"}
    named = "–" if word is None else str(word)
    return element("td", badge(tones.get(named, "open"), named), class_="name")


_DRAWN: Mapping[str, Callable[[Mapping[str, Any]], Html]] = {
    "statistics": _surprises,
    "fits": _fits,
    "plants": _plants,
    "divergences": _divergences,
    "parameters": _parameters,
}
