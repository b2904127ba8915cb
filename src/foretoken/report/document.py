"""The shell of every page, and the parts of prose and tables that pages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foretoken.report.markup import Html, element, join, text
from foretoken.report.style import sheet

ROWS = 1000  # of a table at most: a page stays one that a phone opens


def document(
    title: str,
    parts: Iterable[object],
    setting: Mapping[str, Any] | None = None,
    *,
    lead: object = "",
    footer: object = "",
    style: str = "",
    script: str = "",
) -> str:
    """A whole page, nothing fetched from anywhere.

    lead: a paragraph below the title. setting: the facts that make the figures repeatable, listed at the end.
    style, script: what only this kind of page needs; the script must not hold "<" or "&".
    """
    head = join(
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"Foretoken: {title}"),
        element("style", Html(sheet(style))),
    )
    body = join(
        element("h1", title),
        element("p", lead, class_="note") if lead else "",
        element("main", *parts),
        facts(setting) if setting else "",
        element("footer", element("p", footer)) if footer else "",
        element("script", Html(script)) if script else "",
    )
    page = element("html", element("head", head), element("body", body), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def section(title: object, *parts: object) -> Html:
    """A heading and what belongs to it; nothing if nothing does."""
    content = join(*parts)
    return element("section", element("h2", title), content) if content else Html()


def paragraph(*parts: object, note: bool = False) -> Html:
    """Running text; a note is dim."""
    return element("p", *parts, class_="note" if note else None)


def said(tone: str, headline: object, *parts: object) -> Html:
    """What a page comes to, in a box. tone: "good", "bad", "open" or nothing."""
    return element("div", element("p", element("b", headline)), *parts, class_=f"said {tone}".strip(), role="note")


def badge(tone: str, word: object) -> Html:
    """A verdict in a word."""
    return element("span", word, class_=f"badge {tone}".strip())


def cards(figures: Iterable[tuple[object, object]]) -> Html:
    """Key figures, each above what it is. figures: (figure, name)"""
    items = [element("li", element("b", value), element("span", name)) for value, name in figures]
    return element("ul", *items, class_="cards") if items else Html()


def bullets(items: Iterable[object]) -> Html:
    """A list; nothing for no items."""
    made = [element("li", item) for item in items]
    return element("ul", *made, class_="plain") if made else Html()


def table(
    heads: Sequence[object],
    rows: Iterable[Sequence[object]],
    best: Iterable[int] = (),
    names: int = 1,
    stack: bool = False,
) -> Html:
    """A table whose first ``names`` columns are words and whose others are figures; rows ``best`` stand out.

    At most ``ROWS`` rows are shown, and how many more there are. A cell may be a whole ``<td>``. stack: where there is
    no room, cells stand below each other.
    """
    every, marked = list(rows), frozenset(best)
    body = [
        element("tr", *(_cell(cell, i < names) for i, cell in enumerate(row)), class_="best" if at in marked else None)
        for at, row in enumerate(every[:ROWS])
    ]
    head = element(
        "tr", *(element("th", h, class_="name" if i < names else None, scope="col") for i, h in enumerate(heads))
    )
    made = element("table", element("thead", head), element("tbody", *body), class_="stack" if stack else None)
    more = paragraph(f"and {len(every) - ROWS:,} more rows", note=True) if len(every) > ROWS else ""
    return join(element("div", made, class_="scroll", tabindex=0, role="region", aria_label="table"), more)


def wrapped(*parts: object) -> Html:
    """A cell of words that may take several lines."""
    return element("td", *parts, class_="wrap")


def folded(summary: object, *parts: object, open_: bool = False) -> Html:
    """What only some readers want."""
    return element("details", element("summary", summary), *parts, open=open_)


def grid(*parts: object) -> Html:
    """Side by side where there is room; nothing for nothing."""
    content = join(*parts)
    return element("div", content, class_="grid") if content else Html()


def facts(setting: Mapping[str, Any], title: object = "Setting") -> Html:
    """Names and values as they were recorded."""
    items = [join(element("dt", str(name).replace("_", " ")), element("dd", _fact(str(name), value)))
             for name, value in setting.items()]  # fmt: skip
    listed = element("dl", *items) if items else Html()
    return section(title, listed) if title else listed


def _cell(cell: object, name: bool) -> Html:
    if isinstance(cell, Html) and cell.startswith("<td"):
        return cell
    return element("td", cell, class_="name" if name else None)


def _fact(name: str, value: Any) -> Html:
    if isinstance(value, Mapping):
        return text(", ".join(f"{key} {item}" for key, item in value.items()))
    if isinstance(value, list | tuple):
        return text(", ".join(map(str, value)))
    return element("code", value) if name == "command" else text("–" if value is None else value)
