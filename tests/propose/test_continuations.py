from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.law import PointMass
from foretoken.propose.continuations import candidate_tree

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
