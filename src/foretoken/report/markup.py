"""Markup that cannot be broken into: what is not ``Html`` is escaped where it enters."""

from __future__ import annotations

import math
import re
from html import escape

# Neither XML nor a file in UTF-8 can hold these; a model's text may.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_VOID = frozenset({"br", "meta"})

Attribute = str | int | float | bool | None


class Html(str):
    """Markup: escaped already, or written here."""

    __slots__ = ()


def text(value: object) -> Html:
    """``value`` as text, unless it is markup already."""
    return value if isinstance(value, Html) else Html(escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(value))))


def join(*parts: object) -> Html:
    """One after another."""
    return Html("".join(map(text, parts)))


def element(name: str, /, *children: object, **attributes: Attribute) -> Html:
    """``<name attributes>children</name>``. None and False leave an attribute out, True writes it bare.

    ``class_`` is class, and an underscore inside a name is a hyphen. Well-formed as HTML and as XML.
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
        name = "viewBox"  # the only one of ours whose letters matter
    if value is True:
        return f' {name}="{name}"'
    return f' {name}="{compact(value) if isinstance(value, float) else text(str(value))}"'


def compact(value: float) -> str:
    """A coordinate: a tenth of a unit is finer than a screen."""
    return f"{value:.1f}".removesuffix(".0")


def figure(value: float | None, digits: int = 3) -> str:
    """A measured number with ``digits`` that mean something, a counted one in full, a dash where there is none."""
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


def times(value: float | None) -> str:
    """A ratio as people say it: 2.41x."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """A share of 1 as per cent; very small ones say so."""
    if value is None or not math.isfinite(value):
        return "–"
    return "< 0.1 %" if 0 < value < 0.001 else f"{value:.1%}".replace("%", " %")


def number(value: object) -> float | None:
    """What a record says, if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        known = float(value)
    except OverflowError:
        return None
    return known if math.isfinite(known) else None
