"""HTML pages: values as text, elements, sections, tables, and access to records of other versions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

# Characters that neither XML nor UTF-8 allows, but that a model's text may contain.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_VOID = frozenset({"br", "meta"})

Attribute = str | int | float | bool | None


class Html(str):
    """Markup that needs no escaping."""

    __slots__ = ()


def printable(value: object) -> str:
    """Returns ``value`` as text in which characters that no page may hold are replaced."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(value))


def text(value: object) -> Html:
    """Returns ``value`` escaped, unless it is markup."""
    return value if isinstance(value, Html) else Html(escape(printable(value)))


def join(*parts: object) -> Html:
    return Html("".join(map(text, parts)))


def element(name: str, /, *children: object, **attributes: Attribute) -> Html:
    """Returns ``<name attributes>children</name>``, well-formed as HTML and as XML.

    None and False omit an attribute, True writes it without a value. ``class_`` is class, and other underscores become
    hyphens.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if name in _VOID:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    if value is False:
        return ""
    name = key.removesuffix("_").replace("_", "-")
    if name == "viewbox":
        name = "viewBox"  # the only case-sensitive name in use
    if value is True:
        return f' {name}="{name}"'
    return f' {name}="{compact(value) if isinstance(value, float) else text(str(value))}"'


def compact(value: float) -> str:
    """Returns a coordinate, rounded to a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")


def figure(value: float | None, digits: int = 3) -> str:
    """Returns a float with ``digits`` significant digits, an integer in full, a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if decimals < 0:
        return f"{value:,.0f}"
    return f"{value:.{min(decimals, 9)}f}"


def times(value: object) -> str:
    """Returns a recorded ratio such as 2.41x, a dash if it is not a number."""
    ratio = number(value)
    return "–" if ratio is None else f"{ratio:.2f}x"


def percent(value: object) -> str:
    """Returns a recorded fraction in per cent, a dash if it is not a number."""
    fraction = number(value)
    if fraction is None:
        return "–"
    return "< 0.1 %" if 0 < fraction < 0.001 else f"{fraction:.1%}".replace("%", " %")


def number(value: object) -> float | None:
    """Returns a recorded value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


class PageRecord(dict[str, Any]):
    """A recorded object. Entries that are missing or of another type count as empty, and are shown as a dash."""

    @classmethod
    def of(cls, value: Any) -> PageRecord:
        """Returns ``value`` as a record, an empty one if it is not a mapping."""
        return cls(value) if isinstance(value, Mapping) else cls()

    def record(self, key: str) -> PageRecord:
        return PageRecord.of(self.get(key))

    def records(self, key: str) -> list[PageRecord]:
        return records(self.get(key))

    def items_of(self, key: str) -> list[Any]:
        return _items(self.get(key))

    def text(self, key: str) -> str:
        return str(self.get(key, ""))

    def number(self, key: str) -> float | None:
        """Returns the entry if it is a finite number."""
        return number(self.get(key))

    def value(self, key: str, default: float = 0.0) -> float:
        """Returns the entry if it is a finite number, else ``default``."""
        result = self.number(key)
        return default if result is None else result

    def count(self, key: str) -> int:
        return int(self.value(key))

    def figure(self, key: str, digits: int = 3) -> str:
        return figure(self.number(key), digits)

    def times(self, key: str) -> str:
        return times(self.number(key))

    def percent(self, key: str) -> str:
        return percent(self.number(key))

    def signed(self, key: str) -> str:
        result = self.number(key)
        return "–" if result is None else f"{result:+.2f}"

    def interval(self, low: str = "low", high: str = "high") -> str:
        """Returns an interval, nothing if it has no ends."""
        below, above = self.number(low), self.number(high)
        return "" if below is None or above is None else f"{below:.2f}–{above:.2f}"


def records(value: Any) -> list[PageRecord]:
    return [PageRecord(item) for item in _items(value) if isinstance(item, Mapping)]


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else []


def shown(value: Any) -> str:
    """Returns a recorded value as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return figure(value) if isinstance(value, float) else "–" if value is None else str(value)


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
