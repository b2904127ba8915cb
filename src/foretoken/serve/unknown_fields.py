"""Unknown fields of request bodies: refused by a strict server, otherwise ignored and named in a header.

While one body is validated, a context variable holds the list that their names go to. Without a list they are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

HEADER = b"x-unknown-fields"

_SHOWN = 10  # names in the header
_LONGEST = 60  # characters of a name

_names: ContextVar[list[str] | None] = ContextVar("unknown_fields", default=None)


def collect(names: list[str] | None) -> None:
    """Makes unknown fields go to ``names`` from here on in this context. None makes them errors."""
    _names.set(names)


def ignored(names: Sequence[str]) -> bool:
    """Returns whether unknown fields of these names are ignored, and notes them."""
    noted = _names.get()
    if noted is not None:
        noted += names
    return noted is not None


def header(names: Sequence[str]) -> bytes:
    """Returns the value of the header."""
    each = list(dict.fromkeys(names))
    shown = [ascii(name)[1:-1][:_LONGEST] for name in each[:_SHOWN]]
    more = [f"and {len(each) - _SHOWN} more"] if len(each) > _SHOWN else []
    return ", ".join([*shown, *more]).encode()
