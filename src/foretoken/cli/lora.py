"""LoRA adapters on the command line: NAME=PATH."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.core.checks import shown
from foretoken.core.errors import InvalidRequest

OPTION = "--lora-modules"


def adapters(given: Sequence[str]) -> dict[str, str]:
    """Returns the paths of adapters by name.

    Args:
        given: Texts of the form NAME=PATH, or as in vLLM JSON objects with "name" and "path".

    Raises:
        InvalidRequest: A text is of neither form, or a name is given twice.
    """
    listed: dict[str, str] = {}
    for text in given:
        name, path = _json(text) if text.startswith("{") else text.partition("=")[::2]
        if not name or not path:
            raise InvalidRequest(f"{OPTION} takes NAME=PATH, got {shown(text)}")
        if name in listed:
            raise InvalidRequest(f"{OPTION} names two adapters {name!r}; give each its own name")
        listed[name] = path
    return listed


def is_adapter(text: str) -> bool:
    """Returns whether an argument has the form of an adapter: NAME=PATH or a JSON object."""
    return text.startswith("{") or (not text.startswith("-") and "=" in text)


def checked_adapters(value: Any) -> Mapping[str, str]:
    """Returns the adapters of a model in a configuration file. Raises InvalidRequest."""
    if isinstance(value, dict) and all(name and isinstance(path, str) and path for name, path in value.items()):
        return value
    raise InvalidRequest(f"lora_modules must be an object of paths by name, got {shown(value)}")


def _json(text: str) -> tuple[str, str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "", ""
    name, path = (value.get(key) for key in ("name", "path"))
    return (name, path) if isinstance(name, str) and isinstance(path, str) else ("", "")
