"""The store of responses: bounded, by key, and clear about what it does not have."""

from typing import Any

import pytest

from foretoken.serve.chat_schema import References
from foretoken.serve.errors import ApiError
from foretoken.serve.response_store import ResponseStore, StoredResponse


def response(name: str, previous: str | None = None, owner: str | None = None, text: str = "") -> StoredResponse:
    output = [{"id": f"msg_{name}", "type": "message", "text": text}]
    body: Any = {"id": name, "output": output, "previous_response_id": previous}
    return StoredResponse.of(body, [{"id": f"in_{name}", "role": "user", "content": name}], owner)


def names(store: ResponseStore, of: str, owner: str | None = None) -> list[str]:
    found = store.find(References(of), owner).conversation
    return [part.decode().partition('"id": "')[2].partition('"')[0] for part in found]


def test_a_conversation_is_that_of_all_responses_before_it() -> None:
    store = ResponseStore(10, None)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.add(name, response(name, previous))
    assert names(store, "c") == ["in_a", "msg_a", "in_b", "msg_b", "in_c", "msg_c"]
    assert names(store, "a") == ["in_a", "msg_a"]


def test_the_least_recently_used_are_forgotten_and_a_chain_from_its_end() -> None:
    store = ResponseStore(3, None)
    for name, previous in (("a", None), ("b", "a"), ("x", None)):
        store.add(name, response(name, previous))
    names(store, "b")  # a and b are used
    store.add("y", response("y"))
    with pytest.raises(ApiError):
        store.get("x", None)
    store.add("z", response("z"))
    assert len(store) == 3 and store.get("a", None)
    with pytest.raises(ApiError, match="previous response 'b' is not stored here; it may have been deleted"):
        names(store, "b")


def test_bytes_are_bounded() -> None:
    one = response("a", text="x" * 1000).size
    store = ResponseStore(None, 3 * one)
    for name in "abcdefgh":
        store.add(name, response(name, text="x" * 1000))
    assert len(store) == 3 and store.get("h", None)
    store.add("i", response("i", text="x" * 10_000))  # larger than the whole store
    assert len(store) == 0


def test_keys_see_their_own_responses_only() -> None:
    store = ResponseStore(10, None)
    store.add("a", response("a", owner="k"))
    assert store.get("a", "k")
    for owner in (None, "l"):
        with pytest.raises(ApiError) as caught:
            store.get("a", owner)
        assert caught.value.status == 404
        with pytest.raises(ApiError):
            store.find(References("a"), owner)
        with pytest.raises(ApiError):
            store.find(References(None, ("msg_a",)), owner)
    assert store.find(References(None, ("msg_a", "in_a")), "k").items.keys() == {"msg_a", "in_a"}
    store.delete("a", "k")
    assert len(store) == 0
    with pytest.raises(ApiError, match="item 'msg_a' is not stored"):
        store.find(References(None, ("msg_a",)), "k")


def test_without_bounds_nothing_is_stored() -> None:
    store = ResponseStore(None, None)
    store.add("a", response("a"))
    assert not store.enabled and len(store) == 0
    with pytest.raises(ApiError, match="--response-store"):
        store.get("a", None)
