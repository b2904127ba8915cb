"""The rule of suffix decoding against its definition, and what the store learns from."""

from __future__ import annotations

import time
from collections import Counter
from math import exp, prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.law import PointMass
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.models.base import Scores
from foretoken.propose.base import Observation
from foretoken.propose.continuations import candidate_tree
from foretoken.propose.suffix import METHOD, Suffix, SuffixConfig


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
