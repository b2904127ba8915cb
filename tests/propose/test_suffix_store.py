"""The bound, what is searchable while segments are sorted, and that order of age survives merging."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.propose.matches import BREAK
from foretoken.propose.suffix_store import STORE_TOKENS, SuffixStore, SuffixStores


def output(number: int, length: int = 40) -> list[int]:
    """Tokens that no other output has."""
    return list(range(number * 100, number * 100 + length))


def finds(store: SuffixStore, tokens: list[int]) -> bool:
    tail = np.array(tokens[:8], np.int32)
    result = store.find_matches(tail, 4, min_length=8)
    return bool(len(result.lengths)) and result.following[0].tolist() == tokens[8:12]


@pytest.mark.parametrize("settled", [False, True])
def test_the_bound_holds_and_the_oldest_are_evicted(settled):
    store = SuffixStore(24, max_tokens=4000, max_requests=10_000)
    for number in range(400):
        store.add(output(number))
        assert len(store) <= 4000
        if settled:
            store.settle()
        assert finds(store, output(number))
    store.settle()
    kept = [number for number in range(400) if finds(store, output(number))]
    assert kept == list(range(400 - len(kept), 400))
    assert len(kept) * 41 == len(store) > 4000 * 2 // 3
    assert store.requests == len(kept)


def test_bytes_per_token():
    store = SuffixStore(24, max_tokens=100_000, max_requests=10_000)
    rng = np.random.default_rng(0)
    for _ in range(400):
        store.add(rng.integers(0, 5000, 500).tolist())
    store.settle()
    assert store.nbytes / len(store) < 7
    assert len(store) <= 100_000


@pytest.mark.parametrize("bound", [1, 2, 7, 50])
def test_the_bound_on_requests_holds(bound):
    store = SuffixStore(24, max_tokens=100_000, max_requests=bound)
    for number in range(60):
        store.add(output(number))
        assert 1 <= store.requests <= bound
    store.settle()
    assert finds(store, output(59))


def test_many_outputs_make_few_segments(monkeypatch):
    monkeypatch.setattr("foretoken.propose.suffix_store.FRESH_TOKENS", 64)
    store = SuffixStore(24, max_tokens=1_000_000, max_requests=1_000_000)
    for number in range(2000):
        store.add(output(number))
    store.settle()
    assert store.segments < 12
    assert all(finds(store, output(number)) for number in range(0, 2000, 37))


def test_an_output_beyond_the_bound_keeps_its_end():
    store = SuffixStore(24, max_tokens=20, max_requests=5)
    store.add(output(3, 90))
    assert len(store) == 20
    *_, dropped, first = output(3, 90)[:-18]
    matches = store.find_matches(np.array([dropped, first], np.int32), 19)
    assert matches.lengths.tolist() == [1]  # the token before is gone
    assert matches.following.tolist() == [[*output(3, 90)[-18:], BREAK]]


@pytest.mark.parametrize("tokens, requests", [(0, 10), (1, 10), (100, 0)])
def test_a_store_with_bound_zero_keeps_nothing(tokens, requests):
    store = SuffixStore(24, tokens, requests)
    store.add(output(1))
    store.add([])
    store.settle()
    assert len(store) == 0
    assert not finds(store, output(1))


def test_short_contexts_are_left_out_beside_long_ones():
    store = SuffixStore(24, 1000, 1000)
    store.add([9, 9, 9, 9, 9, 5, 1])
    store.add([5, 2])
    assert store.find_matches(np.array([5], np.int32), 1).following[:, 0].tolist() == [2, 1]
    assert store.find_matches(np.array([9, 9, 9, 5], np.int32), 1).lengths.tolist() == [4, 1]


def test_all_salts_together_keep_within_the_bounds_of_one():
    stores = SuffixStores(24, max_tokens=20 * STORE_TOKENS, max_requests=30)
    for number in range(200):
        stores.add([number, number + 1, number + 2], str(number % 90))
        assert len(stores) + STORE_TOKENS * stores.scopes <= stores.max_tokens
        assert stores.requests <= stores.max_requests
        assert len(stores) == 4 * stores.requests
    assert stores.scopes > 10
    result = stores.find_matches(np.array([199], np.int32), 1, cache_salt=str(199 % 90))
    assert result.following.tolist() == [[200]]
    assert not len(stores.find_matches(np.array([199], np.int32), 1, cache_salt="another").lengths)


def test_the_least_recently_used_salt_loses_its_oldest_outputs_first():
    stores = SuffixStores(24, max_tokens=1_000_000, max_requests=8)
    for salt in ("old", "read", "new"):
        for number in range(3 if salt == "new" else 2):
            stores.add([1, number + 10], salt)
    tail = np.array([1], np.int32)
    stores.find_matches(tail, 1, cache_salt="old")  # used again, so "read" goes first
    stores.add([1, 20], "new")
    stores.add([1, 21], "new")
    left = {
        salt: stores.find_matches(tail, 1, cache_salt=salt).following.flatten().tolist()
        for salt in ("old", "read", "new")
    }
    assert sorted(left["old"]) == [10, 11]
    assert len(left["read"]) < 2 and sorted(left["new"]) == [10, 11, 12, 20, 21]


@pytest.mark.parametrize("tokens, requests", [(0, 10), (10, 0)])
def test_stores_with_bound_zero_keep_nothing(tokens, requests):
    stores = SuffixStores(24, tokens, requests)
    for number in range(10):
        stores.add([1, 2, 3], str(number))
    assert (len(stores), stores.requests, stores.scopes) == (0, 0, 0)
