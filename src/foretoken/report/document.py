"""HTML documents and their elements: sections, tables, lists, folds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.report.markup import Html, element, join, text

ASSETS = Path(__file__).parent
MAX_ROWS = 1000  # rows of a table, so that a phone can open the page


def document(
    title: str,
    parts: Iterable[object],
    setting: Mapping[str, Any] | None = None,
    *,
    lead: object = "",
    footer: object = "",
    script: str = "",
) -> str:
    """Returns a complete page that fetches nothing.

    Args:
        setting: Facts that make the figures reproducible, listed at the end.
        script: Name of a JavaScript file beside this one. It must not contain "<" or "&".
    """
    head = join(
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"Foretoken: {title}"),
        element("style", Html((ASSETS / "page.css").read_text(encoding="utf-8"))),
    )
    body = join(
        element("h1", title),
        element("p", lead, class_="note") if lead else "",
        element("main", *parts),
        facts(setting) if setting else "",
        element("footer", element("p", footer)) if footer else "",
        element("script", Html((ASSETS / script).read_text(encoding="utf-8"))) if script else "",
    )
    page = element("html", element("head", head), element("body", body), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def section(title: object, *parts: object) -> Html:
    """Returns a section with a heading, nothing if it has no content."""
    content = join(*parts)
    return element("section", element("h2", title), content) if content else Html()


def paragraph(*parts: object, note: bool = False) -> Html:
    """Returns a paragraph. A note is dim."""
    return element("p", *parts, class_="note" if note else None)


def verdict(tone: str, headline: object, *parts: object) -> Html:
    """Returns a box with the page's conclusion. tone: "good", "bad", "open" or nothing."""
    return element("div", element("p", element("b", headline)), *parts, class_=f"verdict {tone}".strip(), role="note")


def badge(tone: str, word: object) -> Html:
    return element("span", word, class_=f"badge {tone}".strip())


def cards(figures: Iterable[tuple[object, object]]) -> Html:
    """Returns key figures, each with its name. figures: (figure, name)"""
    items = [element("li", element("b", value), element("span", name)) for value, name in figures]
    return element("ul", *items, class_="cards") if items else Html()


def bullets(items: Iterable[object]) -> Html:
    """Returns a list, nothing for no items."""
    made = [element("li", item) for item in items]
    return element("ul", *made, class_="plain") if made else Html()


def table(
    heads: Sequence[object],
    rows: Iterable[Sequence[object]],
    best: Iterable[int] = (),
    names: int = 1,
    stack: bool = False,
) -> Html:
    """Returns a table, nothing for no rows. A cell may be a complete ``<td>``.

    Args:
        rows: The rows, of which at most ``MAX_ROWS`` are shown.
        best: Indices of highlighted rows.
        names: Number of leading columns that hold words. The others hold figures.
        stack: On narrow screens, cells are stacked.
    """
    every, marked = list(rows), frozenset(best)
    if not every:
        return Html()
    body = [
        element("tr", *(_cell(cell, i < names) for i, cell in enumerate(row)), class_="best" if at in marked else None)
        for at, row in enumerate(every[:MAX_ROWS])
    ]
    head = element(
        "tr", *(element("th", h, class_="name" if i < names else None, scope="col") for i, h in enumerate(heads))
    )
    made = element("table", element("thead", head), element("tbody", *body), class_="stack" if stack else None)
    more = paragraph(f"and {len(every) - MAX_ROWS:,} more rows", note=True) if len(every) > MAX_ROWS else ""
    return join(element("div", made, class_="scroll", tabindex=0, role="region", aria_label="table"), more)


def wrapped(*parts: object) -> Html:
    """Returns a cell whose words may wrap."""
    return element("td", *parts, class_="wrap")


def folded(summary: object, *parts: object, open_: bool = False) -> Html:
    """Returns parts that are hidden until the summary is clicked."""
    return element("details", element("summary", summary), *parts, open=open_)


def grid(*parts: object) -> Html:
    """Returns parts side by side if the screen is wide enough, nothing for no parts."""
    content = join(*parts)
    return element("div", content, class_="grid") if content else Html()


def facts(setting: Mapping[str, Any], title: object = "Setting") -> Html:
    """Returns a list of names and values."""
    items = [
        join(element("dt", str(name).replace("_", " ")), element("dd", _fact(str(name), value)))
        for name, value in setting.items()
    ]
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
