"""A stream repeated by another replica: the client gets each part of it once."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.serve.replicas.front import Replay, ReplayDiffers
from foretoken.serve.stream import event


def completion(number: int, text: str, reason: str | None = None, name: str = "cmpl-1", **more: Any) -> bytes:
    choice = {"index": number, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    return event({"id": name, "object": "text_completion", "created": len(name), "choices": [choice], **more})


def chat(delta: dict[str, Any], reason: str | None = None, name: str = "chat-1") -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return event({"id": name, "object": "chat.completion.chunk", "created": len(name), "choices": [choice]})


def told(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    events = b"".join(parts).split(b"\n\n")[:-1]
    return [json.loads(part[6:]) for part in events if part != b"data: [DONE]"]


def texts(parts: Sequence[bytes]) -> list[str]:
    found: Counter[int] = Counter()
    whole = ["", ""]
    for chunk in told(parts):
        for choice in chunk["choices"]:
            whole[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            found[choice["index"]] += choice["finish_reason"] is not None
    assert all(count == 1 for count in found.values())
    return whole


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False) if a < b]


def stream_of(cuts: list[list[str]], order: list[int], name: str) -> list[bytes]:
    left = [list(parts) for parts in cuts]
    chunks = []
    for number in [*order, *[0, 1] * 20]:
        if left[number]:
            text = left[number].pop(0)
            chunks.append(completion(number, text, None if left[number] else "length", name))
    usage = event({"id": name, "object": "text_completion", "created": len(name), "choices": [], "usage": {"x": 1}})
    return [*chunks, usage, b"data: [DONE]\n\n"]


PLACES = st.lists(st.integers(1, 12), max_size=6)
ORDER = st.lists(st.integers(0, 1), max_size=8)


@given(PLACES, PLACES, ORDER, PLACES, PLACES, ORDER, st.integers(1, 12), st.integers(1, 12))
def test_goes_on_wherever_it_stopped(a, b, first, c, d, second, stop, again):
    """Two choices, chunks cut and ordered in any two ways; even when the second replica is lost as well."""
    whole = ("def main():", "import os, é")
    one = stream_of([cut(whole[0], a), cut(whole[1], b)], first, "cmpl-1")
    two = stream_of([cut(whole[0], c), cut(whole[1], d)], second, "cmpl-other")
    sent = one[:stop]
    for length in (again, len(two)):
        replay = Replay(b"".join(sent))
        sent += [replay.rest(part) for part in two[:length]]
    assert texts(sent) == list(whole)
    assert {chunk["id"] for chunk in told(sent)} == {"cmpl-1"} and {chunk["created"] for chunk in told(sent)} == {6}
    assert b"".join(sent).count(b"[DONE]") == b"".join(sent).count(b'"usage"') == 1


def test_chat_opens_once_and_ends_once() -> None:
    opening = {"role": "assistant", "content": "", "refusal": None}
    replay = Replay(chat(opening) + chat({"content": "Hel"}))
    again = [
        chat(opening, name="b"),
        chat({"content": "He"}, name="b"),
        chat({"content": "llo"}, name="b"),
        chat({}, "stop", name="b"),
        b"data: [DONE]\n\n",
    ]
    rest = [replay.rest(part) for part in again]
    assert rest == [b"", b"", chat({"content": "lo"}), chat({}, "stop"), b"data: [DONE]\n\n"]


@pytest.mark.parametrize("again", [[completion(0, "day")], [completion(0, "d", "stop")], [completion(0, "defx")]])
def test_another_text_is_noticed(again: list[bytes]) -> None:
    replay = Replay(completion(0, "def") + completion(0, " f"))
    with pytest.raises(ReplayDiffers):
        list(map(replay.rest, again))
