"""A stream that goes on after its replica was lost: the same text told again, without what the client has already."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

_HEAD, _END, _DONE = b"data: ", b"\n\n", b"[DONE]"


class Different(Exception):
    """The text told again is not the one that was begun."""


@dataclass
class _Told:
    """Of one choice. again: characters that the replay has come to."""

    text: str = ""
    opened: bool = False
    ended: bool = False
    again: int = 0


class Transcript:
    """What a client was sent of one stream of events, of either endpoint."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []

    def note(self, body: bytes) -> None:
        """It was sent: one event or several, whole."""
        self._sent.append(body)

    def replay(self) -> Replay:
        """For a stream that tells the same from its start."""
        return Replay(b"".join(self._sent))


class Replay:
    """Cuts out of a stream told again what was ``sent`` before; identifier and time stay those of the first telling."""

    def __init__(self, sent: bytes) -> None:
        self._head: dict[str, Any] = {}
        self._told: defaultdict[int, _Told] = defaultdict(_Told)
        self._over = self._counted = False
        for data in _events(sent):
            self._note(data)

    def rest(self, body: bytes) -> bytes:
        """What of these events the client does not have yet. Raises Different."""
        return b"".join(event(found) if isinstance(found, dict) else _HEAD + found + _END for found in self._left(body))

    def _note(self, data: bytes) -> None:
        if data == _DONE:
            self._over = True
            return
        chunk = json.loads(data)
        self._head = self._head or {key: chunk[key] for key in ("id", "created") if key in chunk}
        self._counted |= "choices" in chunk and not chunk["choices"]
        for choice in chunk.get("choices", ()):
            told, (text, opens, ends) = self._told[choice["index"]], _parts(choice)
            told.text += text
            told.opened |= opens
            told.ended |= ends

    def _left(self, body: bytes) -> list[dict[str, Any] | bytes]:
        left: list[dict[str, Any] | bytes] = []
        for data in _events(body):
            if data == _DONE:
                left += [] if self._over else [data]
                continue
            chunk = json.loads(data)
            if "choices" in chunk:
                had = bool(chunk["choices"])
                chunk["choices"] = [choice for choice in chunk["choices"] if self._is_news(choice)]
                if not chunk["choices"] and (had or self._counted):
                    continue
                chunk |= self._head
            left.append(chunk)
        return left

    def _is_news(self, choice: dict[str, Any]) -> bool:
        """Whether anything is left of it; takes out of its text what is not."""
        told, (text, opens, ends) = self._told[choice["index"]], _parts(choice)
        known = told.text[told.again : told.again + len(text)]
        told.again += len(text)
        if not text.startswith(known) or (ends and told.again < len(told.text)):
            raise Different
        fresh = text[len(known) :]
        if text:
            _place(choice)[_name(choice)] = fresh
        return bool(fresh) or (opens and not told.opened) or (ends and not told.ended)


def event(data: Any) -> bytes:
    """As the server writes it: ASCII, without spaces."""
    return _HEAD + json.dumps(data, separators=(",", ":")).encode() + _END


def _events(body: bytes) -> list[bytes]:
    return [part.removeprefix(_HEAD) for part in body.split(_END) if part]


def _parts(choice: dict[str, Any]) -> tuple[str, bool, bool]:
    """Its text, whether it opens the choice, whether it ends it."""
    return _place(choice).get(_name(choice)) or "", "role" in _place(choice), choice.get("finish_reason") is not None


def _place(choice: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = choice.get("delta", choice)
    return found


def _name(choice: dict[str, Any]) -> str:
    return "content" if "delta" in choice else "text"
