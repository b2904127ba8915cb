"""HTML page of an audit: the verdict, each check with its evidence and power, and points of divergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from foretoken.report.charts import Bar, bars
from foretoken.report.document import (
    Html,
    PageRecord,
    badge,
    cards,
    document,
    element,
    facts,
    figure,
    folded,
    grid,
    join,
    number,
    paragraph,
    percent,
    section,
    shown,
    table,
    verdict,
    wrapped,
)

TONES = {"passed": "good", "failed": "bad", "inconclusive": "open"}
HEADLINES = {"passed": "Exact, as far as it was tested", "failed": "Not exact", "inconclusive": "Inconclusive"}
MAX_ZEROS = 16.0  # maximum of -log10 of a p-value on a chart


def page(audit: Mapping[str, Any]) -> str:
    """Returns an HTML document. audit: ``Audit.to_dict()``."""
    root = PageRecord.of(audit)
    outcome, checks, subject = root.get("outcome", "inconclusive"), root.records("checks"), root.record("subject")
    return document(
        "Is this speculation exact?",
        [
            verdict(TONES.get(str(outcome), ""), HEADLINES.get(str(outcome), outcome), paragraph(root.text("summary"))),
            _cards(checks, root),
            section("Checks", _overview(checks)),
            *(_check(check) for check in checks),
            facts(subject, "What was audited"),
        ],
        root.record("setting"),
        lead=_subject(subject),
        footer="A check that passed found no error, and states which errors it would have found. The negative control "
        "plants an error and must find it, else nothing passed. Together, statistical checks call an exact "
        "implementation wrong with a probability of one in a thousand.",
    )


def _subject(subject: PageRecord) -> str:
    names = [shown(subject[key]).rpartition("/")[2] for key in ("model", "draft_model") if subject.get(key)]
    how = [shown(subject[key]) for key in ("engine", "method") if subject.get(key)]
    return ": ".join(part for part in (", ".join(how), " with ".join(names)) if part)


def _cards(checks: Sequence[PageRecord], audit: PageRecord) -> Html:
    counted = [(sum(check.get("outcome") == name for check in checks), name) for name in ("passed", "failed")]
    tokens = sum(check.record("numbers").count("tokens") for check in checks)
    finds = [
        statistic.number("finds")
        for check in checks
        for statistic in check.record("numbers").records("statistics")
        if statistic.get("what") == "probability moved between ranks"
    ]
    smallest = min((value for value in finds if value is not None), default=None)
    figures: list[tuple[object, object]] = [(count, f"checks {name}") for count, name in counted]
    figures.append((f"{tokens:,}", "tokens tested"))
    if smallest is not None:
        figures.append((percent(smallest), "of probability moved would have been found"))
    return cards([*figures, (f"{audit.figure('seconds')} s", "taken")])


def _overview(checks: Sequence[PageRecord]) -> Html:
    rows = [
        (
            check.get("name", ""),
            element("td", _badge(check), class_="name"),
            wrapped(check.text("evidence")),
            f"{check.figure('seconds', 2)} s",
        )
        for check in checks
    ]
    return table(("check", "verdict", "evidence", "took"), rows, names=3, stack=True)


def _badge(check: PageRecord) -> Html:
    outcome = check.text("outcome")
    return badge(TONES.get(outcome, ""), outcome)


def _check(check: PageRecord) -> Html:
    """Returns a section of a check's records: charts and tables of entries with a known form, a list of the others."""
    numbers = check.record("numbers")
    parts = [draw(numbers) for key, draw in _DRAWN.items() if key in numbers]
    other_numbers = {key: value for key, value in numbers.items() if key not in _DRAWN}
    about = facts({key: shown(value) for key, value in other_numbers.items()}, title="")
    if not any(parts) and not other_numbers:
        return Html()
    return section(join(check.get("name", ""), " ", _badge(check)), paragraph(check.get("evidence", "")), *parts, about)


def _surprises(numbers: PageRecord) -> Html:
    """Every statistic's p-value in powers of ten beside the level, and its power."""
    statistics = numbers.records("statistics")
    if not statistics:
        return Html()
    groups: dict[str, list[Bar]] = {}
    for statistic in statistics:
        group, _, name = statistic.text("name").rpartition(": ")
        groups.setdefault(group, []).append(Bar(name, _powers(statistic.get("p_value"))))
    level = _powers(numbers.get("level"))
    limit = None if math.isnan(level) else level
    charts = [bars(group or "statistics", items, "zeros of p", level=limit) for group, items in groups.items()]
    rows = [
        (
            statistic.get("name", ""),
            f"G = {statistic.figure('value')} on {statistic['dof']}"
            if statistic.get("dof")
            else f"z = {statistic.signed('value')}",
            statistic.figure("p_value", 2),
            _finds(statistic),
        )
        for statistic in statistics
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


def _finds(statistic: PageRecord) -> str:
    size, what = statistic.number("finds"), statistic.text("what")
    if size is None:
        return "–"
    return f"{figure(size, 2)} {what}" if what.startswith("nats") else f"{percent(size)} {what}"


def _plants(numbers: PageRecord) -> Html:
    rows = []
    for plant in numbers.records("plants"):
        detected_by = plant.record("found")
        how = ", ".join(f"{name} ({figure(number(z))})" for name, z in detected_by.items())
        if plant.get("impossible"):
            how = f"{plant['impossible']} tokens of probability 0" + (f", {how}" if how else "")
        needed = plant.number("needed")
        missed = "not found" + (f"; about {needed:,.0f} tokens would show it" if needed else "")
        mark = badge("good", "found") if how else badge("open", "not found")
        tokens = f"{plant.count('tokens'):,}"
        rows.append((wrapped(plant.text("error")), element("td", mark, class_="name"), wrapped(how or missed), tokens))
    return table(("planted error", "", "by", "tokens"), rows, names=3)


def _divergences(numbers: PageRecord) -> Html:
    divergences = numbers.records("divergences")
    rows = [
        (
            *(
                divergence.count("prompt") + 1,
                divergence.count("position") + 1,
                divergence.figure("margin"),
                divergence.figure("moved"),
            ),
            divergence.get("kind") or ("a tie" if divergence.get("tie") else "not a tie"),
        )
        for divergence in divergences
    ]
    heads = ("prompt", "token", "best two apart", "passes apart", "verdict")
    texts = [
        _divergence(divergence)
        for divergence in divergences
        if divergence.get("plain") is not None and divergence.get("speculative") is not None
    ]
    return join(element("h3", "Where texts diverge"), table(heads, rows, names=0), *texts[:5]) if rows else Html()


def _divergence(divergence: PageRecord) -> Html:
    """Both texts; all after their common prefix is marked."""
    plain, other = divergence.text("plain"), divergence.text("speculative")
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(plain, other, strict=False))
    common = sum(1 for _ in equal)

    def marked(title: str, text: str) -> Html:
        return element("div", element("h4", title), element("pre", text[:common], element("mark", text[common:])))

    title = f"Prompt {divergence.count('prompt') + 1}, token {divergence.count('position') + 1}"
    texts = element("div", marked("plain", plain), marked("with speculation", other), class_="texts")
    return folded(title, texts, open_=True)


def _fits(numbers: PageRecord) -> Html:
    rows = [
        (prompt, fit.figure("g"), fit.get("dof", ""), fit.figure("p_value", 2), fit.percent("finds"))
        for prompt, fit in enumerate(numbers.records("fits"), 1)
    ]
    return table(("prompt", "G", "degrees of freedom", "p", "would find, moved"), rows, names=0)


def _parameters(numbers: PageRecord) -> Html:
    """Treatment of each parameter by an endpoint, without speculation and with it."""
    rows = [
        (
            parameter.get("parameter", ""),
            _treatment(parameter.get("plain")),
            _treatment(parameter.get("speculative")),
            wrapped(how),
        )
        for parameter in numbers.records("parameters")
        for how in [parameter.text("how")]
    ]
    heads = ("parameter", "plain", "with speculation", "seen")
    return table(heads, rows, names=4, stack=True)


def _treatment(word: Any) -> Html:
    tones = {"honoured": "good", "ignored": "bad", "something else": "bad"}
    named = "–" if word is None else str(word)
    return element("td", badge(tones.get(named, "open"), named), class_="name")


_DRAWN: Mapping[str, Callable[[PageRecord], Html]] = {
    "statistics": _surprises,
    "fits": _fits,
    "plants": _plants,
    "divergences": _divergences,
    "parameters": _parameters,
}
