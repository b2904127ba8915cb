"""Bounds hold for random distributions, for single rows and for means."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.plan.formulas import acceptance, bounds

relaxed = settings(max_examples=25, deadline=None, derandomize=True)
ROUNDING = 1e-9


@st.composite
def rows(draw, count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """p, q: [count, V], from equal to unlike and from flat to one-hot, some tokens impossible."""
    vocab = draw(st.integers(2, 6))
    one = st.lists(st.integers(0, 20), min_size=vocab, max_size=vocab).filter(any)
    p, q = (torch.tensor([draw(one) for _ in range(count)], dtype=torch.float64) for _ in range(2))
    near = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    p, q = (side / side.sum(-1, keepdim=True) for side in (p, q))
    return p, near * p + (1 - near) * q


@relaxed
@given(rows())
def test_divergence_bounds_from_below_either_way(pair):
    p, q = pair
    a = acceptance.token(p, q)
    for kl in (bounds.divergence(p, q), bounds.divergence(q, p)):
        for bound in (bounds.pinsker, bounds.bretagnolle_huber, bounds.from_divergence):
            assert bool((bound(kl) <= a + ROUNDING).all())
            assert float(bound(kl.mean())) <= float(a.mean()) + ROUNDING


@relaxed
@given(rows())
def test_bhattacharyya_bounds_from_both_sides(pair):
    p, q = pair
    a, overlap = acceptance.token(p, q), bounds.bhattacharyya(p, q)
    for limits, value in (
        (bounds.from_bhattacharyya(overlap), a),
        (bounds.from_bhattacharyya(overlap.mean()), a.mean()),
    ):
        # Where BC is 1 but for rounding, 1 - BC^2 holds its rounding alone, and the root makes 1e-8 of 1e-16.
        assert bool((limits.low <= value + 1e-7).all())
        assert bool((value <= limits.high + ROUNDING).all())


@relaxed
@given(rows())
def test_entropies_bound_from_above(pair):
    p, q = pair
    high = bounds.from_entropies(bounds.entropy(p), bounds.entropy(q), p.shape[-1])
    assert bool((acceptance.token(p, q) <= high + ROUNDING).all())


@relaxed
@given(rows())
def test_entropy_of_the_draft_bounds_where_its_premise_holds(pair):
    p, q = pair
    kl, entropy = bounds.divergence(q, p), bounds.entropy(q)
    premise = kl <= 0.4 * entropy
    assert bool((~premise | (bounds.from_draft_entropy(entropy) <= acceptance.token(p, q) + ROUNDING)).all())


def test_entropy_of_the_draft_alone_bounds_nothing():
    p, q = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    assert float(bounds.from_draft_entropy(bounds.entropy(q))) == 1.0
    assert float(acceptance.token(p, q)) == 0.0


@relaxed
@given(rows())
def test_entropy_of_the_target_bounds_its_own_argmax(pair):
    p, _ = pair
    best = acceptance.walk(p, p.argmax(-1, keepdim=True))
    low = bounds.argmax_from_entropy(bounds.entropy(p))
    assert bool((low <= best + ROUNDING).all())
    assert float(bounds.argmax_from_entropy(bounds.entropy(p).mean())) <= float(best.mean()) + ROUNDING


def test_known_values():
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    assert float(bounds.divergence(p, q)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert float(bounds.bhattacharyya(p, q)) == pytest.approx(math.sqrt(0.125) + math.sqrt(0.375))
    assert float(bounds.entropy(p)) == pytest.approx(math.log(2))
    assert float(bounds.pinsker(0.5)) == 0.5
    assert float(bounds.pinsker(9.0)) == 0.0
    assert float(bounds.bretagnolle_huber(math.log(4 / 3))) == pytest.approx(0.5)
    assert float(bounds.from_entropies(math.log(2), 0.0, 2)) == pytest.approx(0.5, abs=1e-6)
    assert float(bounds.divergence(q, torch.tensor([0.0, 1.0]))) == math.inf
    assert float(bounds.from_divergence(math.inf)) == 0.0


def test_the_two_divergence_bounds_cross():
    assert float(bounds.pinsker(0.5)) > float(bounds.bretagnolle_huber(0.5))
    assert float(bounds.pinsker(1.5)) > float(bounds.bretagnolle_huber(1.5))
    assert float(bounds.pinsker(1.7)) < float(bounds.bretagnolle_huber(1.7))
