"""The G-test itself: its level, its power, its pooling."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from .gtest import draws_for, draws_needed, g_test


def law_of(cells: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(cells, 2.0))


def moved(law: np.ndarray, delta: float, seed: int) -> np.ndarray:
    """A law at total variation ``delta``, moved in proportion to itself: the hardest to see."""
    signs = np.where(np.random.default_rng(seed).random(len(law)) < 0.5, 1.0, -1.0)
    up, down = law[signs > 0].sum(), law[signs < 0].sum()
    return law * (1 + np.where(signs > 0, delta / up, -delta / down))


def p_values(true: np.ndarray, claimed: np.ndarray, n: int, repeats: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    named = dict(enumerate(claimed))
    return np.array([g_test(dict(enumerate(rng.multinomial(n, true))), named).p_value for _ in range(repeats)])


def test_the_rule_of_thumb():
    assert draws_needed(0.05, cells=81) == pytest.approx(18 / 0.05**2, rel=0.02)


@pytest.mark.slow
def test_level_under_the_true_law():
    law = law_of(81, 1)
    result = p_values(law, law, draws_needed(0.05, 81), repeats=400)
    assert 0.01 < (result < 0.05).mean() < 0.10
    assert (result < 1e-3).sum() <= 4


def test_power_at_the_stated_distance():
    law = law_of(81, 2)
    wrong = moved(law, 0.05, seed=3)
    assert 0.5 * np.abs(law - wrong).sum() == pytest.approx(0.05)
    result = p_values(wrong, law, draws_needed(0.05, 81), repeats=200)
    assert (result < 1e-3).mean() > 0.83  # 0.9 and three standard errors


def test_a_law_of_small_cells_needs_fewer_draws_for_the_same_power():
    law = dict(enumerate([0.4, 0.3, 0.2, *[0.1 / 78] * 78]))
    draws = draws_for(law, 0.1)
    assert draws == draws_needed(0.1, cells=4) < draws_needed(0.1, cells=81)
    expected = {cell: draws * p for cell, p in law.items()}
    result = g_test(expected, law)
    assert result.dof == 3 and result.delta <= 0.1


def test_small_cells_are_pooled():
    law = dict.fromkeys(range(4), 0.24) | {10 + i: 0.01 for i in range(4)}
    counts = {0: 24, 1: 24, 2: 24, 3: 24, 10: 4}
    assert g_test(counts, law).dof == 4
    assert g_test(counts, law).p_value == pytest.approx(1.0, abs=1e-9)


def test_what_cannot_be_drawn_has_p_value_zero():
    assert g_test(Counter("aab"), {"a": 1.0, "b": 0.0}).p_value == 0.0
    assert g_test(Counter("aab"), {"a": 1.0}).p_value == 0.0


def test_a_certain_law_is_passed_by_its_only_text():
    assert g_test(Counter("aaa"), {"a": 1.0}).p_value == 1.0


def test_no_draws():
    with pytest.raises(ValueError, match="no draws"):
        g_test({}, {"a": 1.0})
