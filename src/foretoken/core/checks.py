"""Checks of what a user gave: each names the value, what was expected and what was got. Raises InvalidRequest."""

from __future__ import annotations

import math
from typing import Any

from foretoken.core.errors import InvalidRequest


def integer(name: str, value: Any, low: int, high: int | None = None, *, optional: bool = False) -> None:
    """An int, not a bool, from ``low`` to ``high``; None passes where ``optional``."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        expected = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(f"{name} must be an integer {expected}{_or_none(optional)}, got {value!r}")


def number(name: str, value: Any, low: float, high: float = math.inf, *, optional: bool = False) -> None:
    """A finite int or float, not a bool, from ``low`` to ``high``; None passes where ``optional``."""
    if value is None and optional:
        return
    if not _finite(value) or not low <= value <= high:
        expected = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name} must be a number {expected}{_or_none(optional)}, got {value!r}")


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _or_none(optional: bool) -> str:
    return ", or None" if optional else ""
