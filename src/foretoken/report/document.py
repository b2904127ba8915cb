"""Pages: the templates of ``templates/``, and values as text."""

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from jinja2 import ChainableUndefined, Environment, FileSystemLoader
from markupsafe import Markup, escape

# Characters that neither XML nor UTF-8 allows, but that a model's text may contain.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
MAX_ROWS = 1000  # rows of a table, so that a phone can open the page


def printable(value: object) -> str:
    """Returns ``value`` as text in which characters that no page may hold are replaced."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(value))


def text(value: object) -> Markup:
    """Returns ``value`` escaped, unless it is markup; a dash for None."""
    if isinstance(value, Markup):
        return value
    return escape("–" if value is None else printable(value))


def compact(value: float) -> str:
    """Returns a coordinate, rounded to a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")


def figure(value: float | None, digits: int = 3) -> str:
    """Returns a float with ``digits`` significant digits, an integer in full, a dash for None."""
    if not _known(value):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if decimals < 0:
        return f"{value:,.0f}"
    return f"{value:.{min(decimals, 9)}f}"


def times(ratio: float | None) -> str:
    """Returns a ratio such as 2.41x, a dash for None."""
    return f"{ratio:.2f}x" if _known(ratio) else "–"


def percent(fraction: float | None) -> str:
    """Returns a fraction in per cent, a dash for None."""
    if not _known(fraction):
        return "–"
    return "< 0.1 %" if 0 < fraction < 0.001 else f"{fraction:.1%}".replace("%", " %")


def interval(low: float | None, high: float | None) -> str:
    """Returns an interval, nothing if it has no ends."""
    return f"{low:.2f}–{high:.2f}" if _known(low) and _known(high) else ""


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def shown(value: object) -> str:
    """Returns a value as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return figure(value) if isinstance(value, float) else "–" if value is None else str(value)


def _fact(value: object) -> object:
    """Returns a setting as text, with all digits of its numbers."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value


class _Templates(Environment):
    """The templates. An expression is escaped unless it is markup; a missing entry of a record is empty text."""

    def __init__(self) -> None:
        super().__init__(
            loader=FileSystemLoader(Path(__file__).with_name("templates"), encoding="utf-8"),
            autoescape=True,
            finalize=text,
            undefined=ChainableUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.filters |= {"times": times, "percent": percent, "figure": figure, "shown": shown, "fact": _fact}
        self.filters["signed"] = lambda value: f"{value:+.2f}"
        self.globals |= {"max_rows": MAX_ROWS, "enumerate": enumerate}
        self.globals["ui"] = self.get_template("parts.jinja").module


@cache
def ui() -> Any:
    """Returns the macros of ``parts.jinja``, by which charts and pages are built."""
    return _templates().globals["ui"]


_templates = cache(_Templates)


def render(template: str, setting: Mapping[str, Any] | None = None, **values: Any) -> str:
    """Returns a complete page that fetches nothing.

    template: Its file, which extends ``page.jinja``. setting: Facts that make the figures reproducible, listed at the
    end.
    """
    return _templates().get_template(template).render(setting=setting or {}, **values)
