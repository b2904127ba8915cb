"""Occurrences against a plain search, in growing and in sorted text."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.propose.occurrences import BREAK, GrowingText, Occurrences, SortedText, sort_suffixes

DEPTH, STEPS = 6, 4
TEXTS = st.lists(st.sampled_from([BREAK, 0, 1, 2, 3]), min_size=1, max_size=80)
TAILS = st.lists(st.integers(0, 3), min_size=1, max_size=DEPTH)


def ids(tokens) -> np.ndarray:
    return np.array(tokens, np.int32)


def growing(tokens, periodic=False) -> GrowingText:
    text = GrowingText(periodic)
    for at in range(0, len(tokens), 7):
        text.extend(tokens[at : at + 7])
    return text


def plain_search(tokens: list[int], tail: list[int], steps: int = STEPS) -> list[tuple[int, tuple[int, ...]]]:
    """(agreement, what follows) of every place with any agreement."""
    found = []
    for place in range(1, len(tokens)):
        length = 0
        while length < min(place, len(tail)) and tokens[place - 1 - length] == tail[-1 - length]:
            length += 1
        if length:
            after = [*tokens[place : place + steps], *[BREAK] * steps][:steps]
            found.append((length, tuple(after)))
    return found


def pairs(found: Occurrences) -> list[tuple[int, tuple[int, ...]]]:
    return [(length, tuple(row)) for length, row in zip(found.lengths.tolist(), found.following.tolist(), strict=True)]


@given(TEXTS, TAILS)
def test_all_occurrences_are_found_with_what_follows(tokens, tail):
    expected = sorted(plain_search(tokens, tail))
    assert sorted(pairs(growing(tokens).occurrences(ids(tail), STEPS, limit=200))) == expected
    # The end of a sorted text is a context too; nothing follows it.
    # In a text that ends in breaks it may look like an occurrence that is there, so they are counted.
    sorted_text = SortedText.build(ids(tokens), DEPTH).occurrences(ids(tail), STEPS, limit=200)
    missing, more = Counter(expected), Counter(pairs(sorted_text))
    assert missing <= more and more.total() <= missing.total() + 1


@given(TEXTS, TAILS, st.integers(1, 5))
def test_counts_are_exact_at_every_length_that_few_places_reach(tokens, tail, limit):
    everything = plain_search([*tokens, BREAK], tail)
    for text in (growing([*tokens, BREAK]), SortedText.build(ids([*tokens, BREAK]), DEPTH)):
        found = pairs(text.occurrences(ids(tail), STEPS, limit))
        assert len(found) <= limit
        assert [length for length, _ in found] == sorted((length for length, _ in found), reverse=True)
        for length in range(1, len(tail) + 1):
            agreeing = [pair for pair in everything if pair[0] >= length]
            if len(agreeing) <= limit:
                assert sorted(pair for pair in found if pair[0] >= length) == sorted(agreeing)
        if everything:
            assert found[0][0] == max(length for length, _ in everything)


@given(TEXTS, TAILS, st.integers(1, DEPTH))
def test_short_agreement_is_left_out(tokens, tail, least):
    for text in (growing([*tokens, BREAK]), SortedText.build(ids([*tokens, BREAK]), DEPTH)):
        expected = sorted(pair for pair in plain_search([*tokens, BREAK], tail) if pair[0] >= least)
        assert sorted(pairs(text.occurrences(ids(tail), STEPS, 200, least))) == expected


@given(st.lists(st.integers(0, 5), max_size=120), st.sampled_from([6, 70_000, 3_000_000]), st.integers(1, 40))
def test_suffixes_come_in_order(tokens, spread, depth):
    values = [token * (spread // 6) for token in tokens]
    padded = np.array([*values, *[spread] * 64], np.uint64)
    order = sort_suffixes(padded, len(values), depth).tolist()
    assert sorted(order) == list(range(len(values)))
    suffixes = [tuple(padded[at : at + depth].tolist()) for at in order]
    assert suffixes == sorted(suffixes)


def test_latest_first_among_equals():
    found = growing([1, 5, 1, 6, 1, 7, 1]).occurrences(ids([1]), 1)
    assert found.following[:, 0].tolist() == [7, 6, 5]


def test_own_text_repeats_itself():
    text = growing([1, 2, 1, 2], periodic=True)
    assert text.occurrences(text.tail(4), 5, limit=1).following[0].tolist() == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("vocabulary, bytes_each", [(4096, 6), (65_534, 6), (65_535, 8), (200_000, 8)])
def test_bytes_per_token_and_large_vocabularies(vocabulary, bytes_each):
    rng = np.random.default_rng(0)
    tokens = np.append(rng.integers(0, vocabulary, 5000).astype(np.int32), vocabulary)
    text = SortedText.build(tokens, 24)
    assert text.nbytes / len(text) == pytest.approx(bytes_each, rel=0.05)
    assert text.tokens().tolist() == tokens.tolist()
    found = text.occurrences(tokens[2000:2024], 8)
    assert found.lengths[0] == 24
    assert found.following[0].tolist() == tokens[2024:2032].tolist()


def test_a_token_beyond_what_the_text_holds_ends_the_agreement():
    text = SortedText.build(ids([1, 2, 3, 4, 5]), 8)
    assert pairs(text.occurrences(ids([65536 + 2, 3]), 2)) == [(1, (4, 5))]
    assert pairs(text.occurrences(ids([2, 65536 + 3]), 2)) == []


def test_nothing_to_find():
    for text in (growing([]), SortedText.build(ids([]), 8), growing([1]), SortedText.build(ids([1]), 8)):
        assert not len(text.occurrences(ids([7]), 3).lengths)
        assert not len(text.occurrences(ids([]), 3).lengths)


def test_the_best_of_several():
    a, b = growing([1, 2, 3, 9]), growing([2, 3, 8, 0, 3, 7])
    best = Occurrences.best([t.occurrences(ids([1, 2, 3]), 1) for t in (a, b)], 2)
    assert pairs(best) == [(3, (9,)), (2, (8,))]
    assert not len(Occurrences.best([], 4).lengths)
