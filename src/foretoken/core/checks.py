"""Validates user input, and declares fields of dataclasses as options of the command line.

Each error names the parameter, the expected range and the value. Raises InvalidRequest.
"""

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any

from foretoken.core.errors import InvalidRequest

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1  # of users' seeds
_SHOWN = 200  # characters of a wrong value that an error shows


def integer(name: str, value: Any, low: int, high: int | None = None, *, optional: bool = False) -> None:
    """Checks for an int, not a bool, from ``low`` to ``high``. None passes if ``optional``."""
    if value is None and optional:
        return
    if not is_integer(value) or value < low or (high is not None and value > high):
        expected = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(
            f"{name} must be an integer {expected}{_or_none(optional)}, got {shown(value)}", param=name
        )


def number(name: str, value: Any, low: float, high: float = math.inf, *, optional: bool = False) -> None:
    """Checks for a finite int or float, not a bool, from ``low`` to ``high``. None passes if ``optional``."""
    if value is None and optional:
        return
    if not is_number(value) or not low <= value <= high:
        expected = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name} must be a number {expected}{_or_none(optional)}, got {shown(value)}", param=name)


def check_keys(
    where: str, keys: Iterable[Any], known: Sequence[str], *, common: Sequence[str] = (), note: str = ""
) -> None:
    """Raises InvalidRequest for keys of a configuration that are not known, and lists the known ones.

    Args:
        where: Name of the configuration.
        common: Keys that the caller handles itself; the message lists them first.
        note: Ends the message.
    """
    if unknown := sorted(map(str, set(keys) - set(known))):
        raise InvalidRequest(
            f"unknown key(s) in {where}: {', '.join(unknown)}; known: {', '.join([*common, *known])}{note}"
        )


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Returns whether ``value`` is an int or a float, not a bool, and finite as a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def shown(value: Any) -> str:
    """Returns ``repr(value)`` for an error message, shortened to at most 200 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _or_none(optional: bool) -> str:
    return ", or None" if optional else ""


def parse_size(text: str) -> int | None:
    """Returns a size such as 2GiB, 512MB or 1000000 in bytes, None if it is none. Units are powers of 1024."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " ")) if match else None


def check_groups(heads: int, kv_heads: int) -> None:
    """Raises InvalidRequest if query heads do not divide among key heads."""
    if heads % kv_heads:
        raise InvalidRequest(f"{heads} heads do not divide among {kv_heads} key heads")


def named(option: str | None, default: Any, **limits: float) -> Any:
    """Declares a field whose option has this name; None for no option. limits: ``min``, the least value."""
    return field(default=default, metadata={"option": option, **limits})


def option_of(name: str, metadata: Mapping[str, Any]) -> str | None:
    """Returns the option of a field, None if it has none."""
    option: str | None = metadata.get("option", f"--{name.replace('_', '-')}")
    return option


def changed_options(settings: Any, usual: Any = None) -> str:
    """Returns the options of the fields that differ from ``usual``, by default from their defaults."""
    usual = type(settings)() if usual is None else usual
    changed = ((f, getattr(settings, f.name)) for f in fields(settings) if option_of(f.name, f.metadata) is not None)
    return " ".join(
        f"{option_of(f.name, f.metadata)}{_argument(value)}" for f, value in changed if value != getattr(usual, f.name)
    )


def _argument(value: object) -> str:
    if value is True:
        return ""
    return " " + (",".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}")
