"""Fields of dataclasses as options of the command line, for packages that do not know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any


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
