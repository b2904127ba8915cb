"""Parses JSON bodies, refuses those that would take long, and says what is wrong with malformed ones."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from foretoken.serve.errors import invalid

MAX_VALUES = 2**17  # arrays, objects and members of objects together; other values parse fast
MAX_DEPTH = 128
_LARGE = 2**16  # bytes that would block the event loop for too long

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read(body: bytes) -> Any:
    """Runs ``parse``, in a thread if it takes long."""
    return parse(body) if len(body) < _LARGE else await asyncio.to_thread(parse, body)


def parse(body: bytes) -> Any:
    """Returns the value of the JSON in ``body``.

    Raises:
        ApiError: 400, it is not JSON in UTF-8, holds half of a surrogate pair, or is nested too deeply or too large.
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
    if _SURROGATE.search(body):
        _check_characters(value)
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
            f"the body holds {values} arrays, objects and members of objects; this server reads at most {MAX_VALUES}",
        )
    if opened > MAX_DEPTH and (depth := _depth(outside)) > MAX_DEPTH:
        raise invalid(f"the body nests arrays and objects {depth} deep; this server reads at most {MAX_DEPTH}")


def _depth(outside: bytes) -> int:
    depth = deepest = 0
    for bracket in re.findall(rb"[\[\]{}]", outside):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _check_characters(value: Any) -> None:
    """Raises ApiError for half of a surrogate pair, which JSON can spell but UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = repr(error.object[error.start])
        raise invalid(f"the body holds {half}, half of a surrogate pair; send whole characters") from error
