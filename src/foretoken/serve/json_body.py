"""Parses and validates JSON bodies; errors name the field as it was sent."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

from foretoken.serve.errors import ApiError, invalid

MAX_VALUES = 2**17  # arrays, objects and members of objects together; other values parse fast
MAX_DEPTH = 128
_LARGE = 2**16  # bytes that would block the event loop for too long

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_NO_OBJECT = ("missing", "model_attributes_type", "model_type", "dict_type")


async def read_json(body: bytes) -> Any:
    """Runs ``parse_json``, in a thread if it takes long."""
    return parse_json(body) if len(body) < _LARGE else await asyncio.to_thread(parse_json, body)


async def read_object(body: bytes) -> dict[str, Any]:
    """Returns the object in ``body``; empty if it is none, which the app that validates it reports."""
    try:
        value = await read_json(body)
    except ApiError:
        return {}
    return value if isinstance(value, dict) else {}


def parse_json(body: bytes) -> Any:
    """Returns the value of the JSON in ``body``.

    Raises a 400 ApiError if it is not JSON in UTF-8, holds half of a surrogate pair, or is nested too deeply or too
    large.
    """
    _check_structure(body)
    try:
        value = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        where = f"byte 0x{body[error.start]:02x} at position {error.start}: {error.reason}"
        raise invalid(f"the body is not UTF-8 ({where}); send JSON in UTF-8") from error
    except json.JSONDecodeError as error:
        where = f"{error.msg} at character {error.pos}"
        raise invalid(f"the body is not JSON ({where}); expected a JSON object") from error
    except ValueError as error:  # a number of too many digits
        raise invalid(f"the body cannot be read: {error}") from error
    if _SURROGATE.search(body):  # JSON can spell half of a surrogate pair, but UTF-8 cannot encode it
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = repr(error.object[error.start])
            raise invalid(f"the body holds {half}, half of a surrogate pair; send whole characters") from error
    return value


def _check_structure(body: bytes) -> None:
    """Raises ApiError for too many or too deeply nested values, counted outside of strings without parsing."""
    if max(body.count(b"["), body.count(b"{"), body.count(b":")) <= MAX_DEPTH:
        return
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    opened = outside.count(b"[") + outside.count(b"{")
    values = opened + outside.count(b":")
    if values > MAX_VALUES:
        raise invalid(
            f"the body holds {values} arrays, objects and members of objects; this server reads at most {MAX_VALUES}"
        )
    if opened <= MAX_DEPTH:
        return
    steps = (1 if bracket in b"[{" else -1 for bracket in re.findall(rb"[\[\]{}]", outside))
    depth = max(accumulate(steps))
    if depth > MAX_DEPTH:
        raise invalid(f"the body nests arrays and objects {depth} deep; this server reads at most {MAX_DEPTH}")


_Path = tuple[str | int, ...]


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Returns the response to pydantic's errors about the first wrong field of ``body``.

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
    right that reaches the end; if none does, because the end is a type, the longest. ``value`` is at the beginning of
    ``location``; ``missing`` is whether the end is a key that is missing.
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
