"""Server-sent events, as this server writes them."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """Returns one event. name: its type, for APIs whose events have one.

    It is ASCII, because clients that split lines by Unicode rules would break a text at U+2028 or U+0085.
    """
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
