"""Occurrences in text against a plain search, trees of their continuations, and drafts by lookup."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.context import Context
from foretoken.core.draft import PointMass
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.propose.matches import BREAK, GrowingText, Matches
from foretoken.propose.suffix import Lookup, LookupConfig
from foretoken.propose.suffix_array import SuffixArray, sort_suffixes
from foretoken.propose.tree import candidate_tree

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
    matches = []
    for place in range(1, len(tokens)):
        length = 0
        while length < min(place, len(tail)) and tokens[place - 1 - length] == tail[-1 - length]:
            length += 1
        if length:
            after = [*tokens[place : place + steps], *[BREAK] * steps][:steps]
            matches.append((length, tuple(after)))
    return matches


def pairs(matches: Matches) -> list[tuple[int, tuple[int, ...]]]:
    return [
        (length, tuple(row)) for length, row in zip(matches.lengths.tolist(), matches.following.tolist(), strict=True)
    ]


@given(TEXTS, TAILS)
def test_all_occurrences_are_found_with_what_follows(tokens, tail):
    expected = sorted(plain_search(tokens, tail))
    assert sorted(pairs(growing(tokens).find_matches(ids(tail), STEPS, limit=200))) == expected
    # The end of a sorted text is a context too; nothing follows it.
    # In a text that ends in breaks it may look like an occurrence that is there, so they are counted.
    sorted_text = SuffixArray.build(ids(tokens), DEPTH).find_matches(ids(tail), STEPS, limit=200)
    missing, more = Counter(expected), Counter(pairs(sorted_text))
    assert missing <= more and more.total() <= missing.total() + 1


@given(TEXTS, TAILS, st.integers(1, 5))
def test_counts_are_exact_at_every_length_with_few_matches(tokens, tail, limit):
    everything = plain_search([*tokens, BREAK], tail)
    for text in (growing([*tokens, BREAK]), SuffixArray.build(ids([*tokens, BREAK]), DEPTH)):
        matches = pairs(text.find_matches(ids(tail), STEPS, limit))
        assert len(matches) <= limit
        assert [length for length, _ in matches] == sorted((length for length, _ in matches), reverse=True)
        for length in range(1, len(tail) + 1):
            agreeing = [pair for pair in everything if pair[0] >= length]
            if len(agreeing) <= limit:
                assert sorted(pair for pair in matches if pair[0] >= length) == sorted(agreeing)
        if everything:
            assert matches[0][0] == max(length for length, _ in everything)


@given(TEXTS, TAILS, st.integers(1, DEPTH))
def test_matches_below_the_minimum_length_are_left_out(tokens, tail, min_length):
    for text in (growing([*tokens, BREAK]), SuffixArray.build(ids([*tokens, BREAK]), DEPTH)):
        expected = sorted(pair for pair in plain_search([*tokens, BREAK], tail) if pair[0] >= min_length)
        assert sorted(pairs(text.find_matches(ids(tail), STEPS, 200, min_length))) == expected


@given(st.lists(st.integers(0, 5), max_size=120), st.sampled_from([6, 70_000, 3_000_000]), st.integers(1, 40))
def test_suffixes_are_sorted(tokens, spread, depth):
    values = [token * (spread // 6) for token in tokens]
    padded = np.array([*values, *[spread] * 64], np.uint64)
    order = sort_suffixes(padded, len(values), depth).tolist()
    assert sorted(order) == list(range(len(values)))
    suffixes = [tuple(padded[at : at + depth].tolist()) for at in order]
    assert suffixes == sorted(suffixes)


def test_latest_first_among_equals():
    matches = growing([1, 5, 1, 6, 1, 7, 1]).find_matches(ids([1]), 1)
    assert matches.following[:, 0].tolist() == [7, 6, 5]


def test_periodic_matches_wrap_around():
    text = growing([1, 2, 1, 2], periodic=True)
    assert text.find_matches(text.tail(4), 5, limit=1).following[0].tolist() == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("vocabulary, bytes_each", [(4096, 6), (65_534, 6), (65_535, 8), (200_000, 8)])
def test_bytes_per_token_and_large_vocabularies(vocabulary, bytes_each):
    rng = np.random.default_rng(0)
    tokens = np.append(rng.integers(0, vocabulary, 5000).astype(np.int32), vocabulary)
    text = SuffixArray.build(tokens, 24)
    assert text.nbytes / len(text) == pytest.approx(bytes_each, rel=0.05)
    assert text.tokens().tolist() == tokens.tolist()
    matches = text.find_matches(tokens[2000:2024], 8)
    assert matches.lengths[0] == 24
    assert matches.following[0].tolist() == tokens[2024:2032].tolist()


def test_a_token_too_large_for_the_array_ends_the_match():
    text = SuffixArray.build(ids([1, 2, 3, 4, 5]), 8)
    assert pairs(text.find_matches(ids([65536 + 2, 3]), 2)) == [(1, (4, 5))]
    assert pairs(text.find_matches(ids([2, 65536 + 3]), 2)) == []


def test_empty_texts_and_patterns_have_no_matches():
    for text in (growing([]), SuffixArray.build(ids([]), 8), growing([1]), SuffixArray.build(ids([1]), 8)):
        assert not len(text.find_matches(ids([7]), 3).lengths)
        assert not len(text.find_matches(ids([]), 3).lengths)


def test_the_best_matches_of_several_texts():
    a, b = growing([1, 2, 3, 9]), growing([2, 3, 8, 0, 3, 7])
    best = Matches.best([t.find_matches(ids([1, 2, 3]), 1) for t in (a, b)], 2)
    assert pairs(best) == [(3, (9,)), (2, (8,))]
    assert not len(Matches.best([], 4).lengths)


ROWS = st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=12)


def node_paths(drafted) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(drafted.tokens, drafted.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, drafted.probs, strict=True))


def probabilities(rows) -> dict[tuple[int, ...], float]:
    return {
        path: share
        for depth in (1, 2, 3)
        for path in product(range(3), repeat=depth)
        if (share := sum(row[:depth] == path for row in rows) / len(rows)) > 0
    }


@given(ROWS, st.integers(1, 20), st.integers(1, 3))
def test_the_likeliest_nodes_with_their_shares(rows, budget, steps):
    drafted = candidate_tree(Counter(rows), budget, steps, top_k=3)
    every = {path: p for path, p in probabilities(rows).items() if len(path) <= steps}
    chosen = node_paths(drafted)
    assert len(chosen) == len(drafted.tokens) == min(budget, len(every))
    assert all(p == pytest.approx(every[path]) for path, p in chosen.items())
    assert sorted(chosen.values()) == pytest.approx(sorted(every.values())[-len(chosen) :])
    assert isinstance(drafted.draft().law, PointMass)


@given(ROWS)
def test_one_child_each_makes_a_chain_of_commonest_tokens(rows):
    drafted = candidate_tree(Counter(rows), 10, 3, top_k=1)
    assert drafted.draft().is_chain
    matching = rows
    for depth, token in enumerate(drafted.tokens):
        counts = Counter(row[depth] for row in matching)
        assert counts[token] == max(counts.values())
        matching = [row for row in matching if row[depth] == token]


def test_ended_continuations_count_but_are_not_drafted():
    drafted = candidate_tree({(1, -1): 3.0, (1, 2): 1.0}, 8, 8, 4)
    assert (drafted.tokens, drafted.probs) == ([1, 2], [1.0, 0.25])
    assert candidate_tree({(1, -1): 3.0, (1, 2): 1.0}, 8, 8, 4, min_prob=0.3).tokens == [1]


def test_no_continuations_make_an_empty_tree():
    assert len(candidate_tree({}, 4, 4, 4).draft()) == 0
    assert len(candidate_tree({(-1,): 1.0}, 4, 4, 4).draft()) == 0


def context(tokens: list[int]) -> Context:
    return Context(0, tokens, len(tokens), SamplingLaw(), Streams(0))


def drafted(tokens: list[int], budget: int, config: LookupConfig | None = None) -> tuple[int, ...]:
    return Lookup(config).propose([context(tokens)], [budget])[0].ids


def test_the_longest_match_wins_over_a_later_short_one() -> None:
    assert drafted([1, 2, 3, 9, 9, 3, 7, 1, 2, 3], 2) == (9, 9)


def test_the_latest_occurrence_wins() -> None:
    assert drafted([5, 1, 5, 2, 5], 1) == (2,)


def test_periodic_text_continues_its_period() -> None:
    assert drafted([1, 2, 1, 2], 5) == (1, 2, 1, 2, 1)


def test_texts_without_a_match_are_not_drafted_for() -> None:
    assert drafted([1, 2, 3], 4) == ()
    assert drafted([1], 4) == ()
    assert drafted([1, 1], 0) == ()


def test_the_minimum_match_length_holds() -> None:
    assert drafted([4, 1, 5, 1], 2, LookupConfig(2, 3)) == ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_incremental_equals_from_scratch_and_a_plain_search(tokens: list[int], budget: int) -> None:
    lookup = Lookup()
    live = context([])
    for token in tokens:
        live.tokens.append(token)
        draft = lookup.propose([live], [budget])[0]
    assert isinstance(draft.law, PointMass)
    assert draft.ids == drafted(tokens, budget)
    for length in range(min(4, len(tokens)), 0, -1):
        ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == tokens[-length:]]
        if ends:
            assert draft.ids[0] == tokens[ends[-1]]
            return
    assert draft.ids == ()
