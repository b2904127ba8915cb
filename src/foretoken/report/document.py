"""Pages: the templates of ``templates/``, recorded values as text, and access to records of other versions."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

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


def interval(low: object, high: object) -> str:
    """Returns a recorded interval, nothing if it has no ends."""
    below, above = number(low), number(high)
    return "" if below is None or above is None else f"{below:.2f}–{above:.2f}"


def number(value: object, default: Any = None) -> Any:
    """Returns a recorded value as a float if it is a finite number, else ``default``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    try:
        result = float(value)
    except OverflowError:
        return default
    return result if math.isfinite(result) else default


def record(value: object) -> Mapping[str, Any]:
    """Returns a recorded object, an empty one if it is of another type."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> list[Any]:
    """Returns a recorded list, an empty one if it is of another type."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else []


def records(value: object) -> list[Mapping[str, Any]]:
    """Returns the objects in a recorded list."""
    return [item for item in listed(value) if isinstance(item, Mapping)]


def shown(value: object) -> str:
    """Returns a recorded value as text."""
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
        self.filters |= {function.__name__: function for function in (times, percent, number, record, records, listed)}
        self.filters |= {"shown": shown, "fact": _fact, "figure": lambda value, *digits: figure(number(value), *digits)}
        self.filters["signed"] = lambda value: "–" if number(value) is None else f"{number(value):+.2f}"
        self.globals |= {"interval": interval, "max_rows": MAX_ROWS, "enumerate": enumerate}
        self.globals["ui"] = self.get_template("parts.jinja").module


@cache
def ui() -> Any:
    """Returns the macros of ``parts.jinja``, by which charts and pages are built."""
    return _templates().globals["ui"]


_templates = cache(_Templates)


def render(template: str, setting: object = None, **values: Any) -> str:
    """Returns a complete page that fetches nothing.

    template: Its file, which extends ``page.jinja``. setting: Facts that make the figures reproducible, listed at the
    end.
    """
    return _templates().get_template(template).render(setting=record(setting), **values)
