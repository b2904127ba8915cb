"""Continues a stream after its replica was lost: the text is generated again, and the part already sent is cut."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from foretoken.serve.sse import event

REPLAYED_PATHS = ("/v1/completions", "/v1/chat/completions")  # whose streams are chunks with choices
_HEAD, _END, _DONE = b"data: ", b"\n\n", b"[DONE]"


class Different(Exception):
    """The text that was generated again differs from the text that was sent."""


@dataclass
class _SentChoice:
    """The part of one choice that was sent. ``again`` counts the characters of the replay."""

    text: str = ""
    opened: bool = False
    ended: bool = False
    again: int = 0


class Transcript:
    """The events of a stream that were sent to the client, of either endpoint."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []

    def note(self, body: bytes) -> None:
        """Records one or more whole events that were sent."""
        self._sent.append(body)

    def replay(self) -> Replay:
        """Returns the replay for a stream that begins the same text again."""
        return Replay(b"".join(self._sent))


class Replay:
    """Removes the part that was ``sent`` from a repeated stream, and keeps the first stream's identifier and time."""

    def __init__(self, sent: bytes) -> None:
        self._head: dict[str, Any] = {}
        self._sent_choices: defaultdict[int, _SentChoice] = defaultdict(_SentChoice)
        self._over = self._counted = False
        for data in _events(sent):
            self._note(data)

    def rest(self, body: bytes) -> bytes:
        """Returns the part of these events that was not sent yet. Raises Different."""
        return b"".join(event(part) if isinstance(part, dict) else _HEAD + part + _END for part in self._left(body))

    def _note(self, data: bytes) -> None:
        if data == _DONE:
            self._over = True
            return
        chunk = json.loads(data)
        self._head = self._head or {key: chunk[key] for key in ("id", "created") if key in chunk}
        self._counted |= "choices" in chunk and not chunk["choices"]
        for choice in chunk.get("choices", ()):
            sent, (text, opens, ends) = self._sent_choices[choice["index"]], _parts(choice)
            sent.text += text
            sent.opened |= opens
            sent.ended |= ends

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
        """Returns whether anything of a choice is new, and cuts the rest from its text."""
        sent, (text, opens, ends) = self._sent_choices[choice["index"]], _parts(choice)
        known = sent.text[sent.again : sent.again + len(text)]
        sent.again += len(text)
        if not text.startswith(known) or (ends and sent.again < len(sent.text)):
            raise Different
        fresh = text[len(known) :]
        if text:
            _place(choice)[_name(choice)] = fresh
        return bool(fresh) or (opens and not sent.opened) or (ends and not sent.ended)


def _events(body: bytes) -> list[bytes]:
    return [part.removeprefix(_HEAD) for part in body.split(_END) if part]


def _parts(choice: dict[str, Any]) -> tuple[str, bool, bool]:
    """Returns a choice's text, whether it opens the choice, and whether it ends it."""
    return _place(choice).get(_name(choice)) or "", "role" in _place(choice), choice.get("finish_reason") is not None


def _place(choice: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = choice.get("delta", choice)
    return part


def _name(choice: dict[str, Any]) -> str:
    return "content" if "delta" in choice else "text"
