"""Block verification never accepts less than token rejection, and exactly what its formula predicts."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .decode_step import PROMPT, Pair, constant, drawn, table
from .enumerate import outcomes


def accepted(pair: Pair) -> float:
    return sum(p * (len(emitted) - 1) for emitted, p in outcomes(lambda s: pair.step((), s), position=0).items())


def simplex(vocab: int) -> st.SearchStrategy[tuple[float, ...]]:
    weights = st.lists(st.integers(0, 6), min_size=vocab, max_size=vocab).filter(any)
    return weights.map(lambda w: tuple(x / sum(w) for x in w))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(2, 3).flatmap(lambda v: st.tuples(simplex(v), simplex(v))), st.integers(1, 3))
@pytest.mark.slow
def test_block_is_exact_and_never_worse_than_token(distributions, depth):
    p, q = (constant(*law) for law in distributions)
    depth = depth if len(distributions[0]) == 2 else min(depth, 2)
    block, token = (Pair(p, drawn(q), rejection=r, budget=lambda g: depth) for r in ("block", "token"))
    assert block.gap(length=1) < 1e-12
    assert token.gap(length=1) < 1e-12
    assert accepted(block) >= accepted(token) - 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_block_accepts_what_its_weights_predict(seed):
    """E[accepted] = sum_i E_q[w_i]."""
    p, q = table(3, seed=seed), table(3, seed=100 + seed)
    predicted = 0.0
    for length in (1, 2, 3):
        for path in product(range(3), repeat=length):
            w, mass = 1.0, 1.0
            for i, token in enumerate(path):
                p_row, q_row = (model((*PROMPT, *path[:i])).softmax(-1) for model in (p, q))
                mass *= float(q_row[token])
                w = min(1.0, w * float(p_row[token] / q_row[token]))
            predicted += mass * w
    assert accepted(Pair(p, drawn(q))) == pytest.approx(predicted, abs=1e-12)
