"""HTML elements, and values as text. Values that are not ``Html`` are escaped."""

from __future__ import annotations

import math
import re
from html import escape

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
