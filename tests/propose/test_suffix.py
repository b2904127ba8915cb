"""Suffix decoding against its definition, and the store of outputs: bounds, order of age, contents."""

import time
from collections import Counter
from math import exp, prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.context import Context
from foretoken.core.draft import Draft, PointMass
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.models.base import Scores
from foretoken.propose.base import Observation
from foretoken.propose.matches import BREAK
from foretoken.propose.suffix import METHOD, STORE_TOKENS, Suffix, SuffixConfig, SuffixStore
from foretoken.propose.tree import candidate_tree


def context(tokens, identifier=0, prompt=None) -> Context:
    tokens = list(tokens)
    return Context(identifier, tokens, len(tokens) if prompt is None else prompt, SamplingLaw(), Streams(0))


def config(**options) -> SuffixConfig:
    return SuffixConfig(**{f"suffix_decoding_{k}" if k != "top_k" else k: v for k, v in options.items()})


def drafted(tokens, budget, **options) -> Draft:
    return Suffix(config(**options)).propose([context(tokens)], [budget])[0]


def finish(proposer: Suffix, c: Context, reason: str | None, draft: Draft | None = None) -> None:
    timings = Timings(0.0, 0.0, 0.0, 0.0, 1)
    step = StepOutput(
        c.id, c.generated, draft or Draft.empty(), Verdict((), c.tokens[-1]), (c.tokens[-1],), timings, reason
    )
    proposer.observe([c], [Observation(step, Scores(torch.zeros(1, 4)))])
    c.finish_reason = reason
    proposer.forget(c)
    proposer.store.settle()


def by_definition(tokens, budget, factor, min_prob, depth) -> tuple[float, int]:
    """Best (score, match length) over all lengths, counting by plain search in a text that repeats itself."""
    best = (0.0, 0)
    for length in range(1, min(depth, len(tokens) - 1) + 1):
        ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == tokens[-length:]]
        steps = min(int(factor * length), budget)
        if not ends or not steps:
            continue
        rows = Counter(tuple(tokens[e + i % (len(tokens) - e)] for i in range(budget)) for e in reversed(ends))
        best = max(best, (candidate_tree(rows, budget, steps, 1, min_prob).score, length))
    return best


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 8),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 0.1, 0.6]),
)
def test_the_best_score_wins(tokens, budget, factor, min_prob):
    draft = drafted(tokens, budget, max_spec_factor=factor, min_token_prob=min_prob, top_k=1, max_tree_depth=8)
    score, length = by_definition(tokens, budget, factor, min_prob, 8)
    assert len(draft) <= min(budget, int(factor * length))
    assert isinstance(draft.law, PointMass)
    holds = [(length + depth) / (length + depth + 2) for depth in range(len(draft))]  # P(the match goes on)
    shares = [exp(score) / prod(holds[: depth + 1]) for depth, score in enumerate(draft.scores)] if holds else []
    assert sum(shares) == pytest.approx(score, abs=1e-5)


def test_a_long_match_is_followed_further_than_a_short_one():
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    assert drafted([*text, 9, 9, 9, 2, 3], 8, max_spec_factor=1.0).ids == (4, 5)
    assert drafted([*text, 9, 9, 9, 1, 2, 3], 8, max_spec_factor=1.0).ids == (4, 5, 6)
    assert drafted([*text, 9, 9, 9, 1, 2, 3], 8, max_spec_factor=2.0).ids == (4, 5, 6, 7, 8, 9)
    assert drafted([*text, 9, 9, 9, 1, 2, 3], 2).ids == (4, 5)


def test_a_tree_covers_what_a_chain_leaves_out():
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    chain = drafted(tokens, 4, top_k=1, max_spec_factor=1.0, max_tree_depth=2)
    tree = drafted(tokens, 4, top_k=2, max_spec_factor=1.0, max_tree_depth=2)
    assert chain.is_chain and chain.ids[0] == 3
    assert {tree.ids[node] for node in tree.children[0]} == {3, 4}


def test_finished_outputs_are_found_by_later_requests():
    proposer = Suffix()
    first = context([1, 2, 3, 50, 51, 52, 53, 54], identifier=1, prompt=3)
    finish(proposer, first, "stop")
    assert proposer.propose([context([9, 1, 2, 3], identifier=2)], [4])[0].ids == (50, 51, 52, 53)
    assert proposer.propose([context([9, 51, 52], identifier=3)], [4])[0].ids == (53, 54)


@pytest.mark.parametrize("reason", ["abort", None])
def test_unfinished_ones_are_not_kept(reason):
    proposer = Suffix()
    finish(proposer, context([1, 2, 3, 50, 51], identifier=1, prompt=3), reason)
    assert len(proposer.store) == 0
    assert proposer.propose([context([1, 2, 3], identifier=2)], [4])[0].ids == ()


def test_rejected_tokens_are_not_stored():
    proposer = Suffix()
    c = context([1, 2, 3, 50, 51], identifier=1, prompt=3)
    finish(proposer, c, "stop", draft=Draft.chain([77, 78]))
    assert len(proposer.store) == 5 + 1  # and a break
    assert proposer.propose([context([9, 50, 51], identifier=2)], [4])[0].ids == ()


def test_only_the_end_of_a_long_prompt_is_stored():
    proposer = Suffix(config(max_tree_depth=4))
    finish(proposer, context(range(100), prompt=90), "length")
    assert len(proposer.store) == 4 + 10 + 1


def test_a_forgotten_sequence_that_resumes_is_indexed_again():
    proposer, c = Suffix(), context([1, 2, 3, 1, 2])
    before = proposer.propose([c], [3])[0].ids
    proposer.forget(c)
    assert proposer.propose([c], [3])[0].ids == before


def test_a_prompt_of_a_hundred_thousand_tokens_is_fast():
    pattern = [i * i % 4001 for i in range(100_000)]
    proposer, c = Suffix(), context([*pattern, *pattern[:30]])
    started = time.process_time()
    draft = proposer.propose([c], [16])[0]
    c.tokens.extend(draft.ids)
    again = proposer.propose([c], [16])[0]
    assert time.process_time() - started < 1.0
    assert draft.ids == tuple(pattern[30:46])
    assert again.ids == tuple(pattern[46:62])


def test_budgets_and_empty_texts():
    proposer = Suffix()
    assert proposer.propose([context([1, 1, 1]), context([])], [0, 4]) == [Draft.empty(), Draft.empty()]
    proposer.forget(context([5], identifier=77))


@pytest.mark.parametrize(
    "options",
    [
        {"suffix_decoding_max_tree_depth": 0},
        {"suffix_decoding_max_tree_depth": 65},
        {"suffix_decoding_max_cached_requests": -1},
        {"suffix_decoding_max_cached_tokens": 1.5},
        {"suffix_decoding_max_spec_factor": -1.0},
        {"suffix_decoding_min_token_prob": 2},
        {"top_k": 0},
    ],
)
def test_bad_keys_are_named(options):
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        METHOD.config(**options)


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
    monkeypatch.setattr("foretoken.propose.suffix.FRESH_TOKENS", 64)
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
    stores = SuffixStore(24, max_tokens=20 * STORE_TOKENS, max_requests=30)
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
    stores = SuffixStore(24, max_tokens=1_000_000, max_requests=8)
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
    stores = SuffixStore(24, tokens, requests)
    for number in range(10):
        stores.add([1, 2, 3], str(number))
    assert (len(stores), stores.requests, stores.scopes) == (0, 0, 0)
