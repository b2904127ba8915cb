"""Errors of pydantic as answers that name the field as it was sent: ``messages.0.content``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from foretoken.serve.errors import ApiError, invalid

_Path = tuple[str | int, ...]
_NO_OBJECT = ("missing", "model_attributes_type", "model_type", "dict_type")


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Returns the response to pydantic's errors about ``body``: those of the first wrong field.

    A value that may have several types has errors for each of them. Those that lie deepest concern the type that fits
    best.
    """
    first = errors[0]
    if first["loc"] == ("body",) and first["type"] in _NO_OBJECT:
        return invalid("the body must be a JSON object, sent with Content-Type: application/json")
    located = [(_path(error, body), error) for error in errors if error["loc"][:2] == first["loc"][:2]]
    depth = max(len(path) for path, _ in located)
    deepest = [(path, error) for path, error in located if len(path) == depth]
    paths = list(dict.fromkeys(path for path, _ in deepest))
    path = paths[0] if len(paths) == 1 else _common(paths)
    unknown = [error for _, error in deepest if error["type"] == "unknown_field"]
    reasons = dict.fromkeys(str(error["msg"]) for error in unknown or [error for _, error in deepest])
    param, reason = ".".join(map(str, path)), "; or ".join(reasons)
    prefix = "" if not param or unknown or reason.startswith(param) else f"{param}: "
    return invalid(prefix + reason, param=param or None)


def _path(error: Mapping[str, Any], body: Any) -> _Path:
    """Returns the path of a wrong value.

    An error about an object as a whole names the field to blame in its context.
    """
    if error["loc"][0] != "body":  # a parameter of the query
        return tuple(error["loc"][1:])
    _, path = _resolved(error["loc"][1:], body, error["type"] == "missing")
    context = error.get("ctx", {})
    if field := context.get("field"):
        return (*path, field)
    if error["type"].startswith("union_tag") and (discriminator := context["discriminator"]).startswith("'"):
        return (*path, discriminator.strip("'"))
    return path


def _resolved(location: _Path, value: Any, missing: bool) -> tuple[bool, _Path]:
    """Returns whether the end of a location is in ``value``, and the path to it.

    Pydantic's location also names the types that it has tried, which may look like keys. Of all readings the one is
    right that reaches the end; if none does, because the end is a type, the longest.

    Args:
        location: What is left of the location.
        value: The value at its beginning.
        missing: Whether the end is a key that is missing.
    """
    if not location:
        return False, ()
    part, rest = location[0], location[1:]
    readings = []
    if _holds(value, part):
        reached, path = _resolved(rest, value[part], missing)
        readings.append((reached or not rest, (part, *path)))
    if rest:
        readings.append(_resolved(rest, value, missing))
    elif missing and not readings:
        readings.append((True, (part,)))
    return max(readings, key=lambda reading: (reading[0], len(reading[1])), default=(False, ()))


def _holds(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, Mapping) and part in value


def _common(paths: Sequence[_Path]) -> _Path:
    """Returns the longest path that all of ``paths`` begin with."""
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return tuple(parts[0] for parts in alike)
