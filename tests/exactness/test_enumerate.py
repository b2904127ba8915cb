"""The enumerator and the G-test: sums, level and power; both distinguish wrong distributions from right ones."""

from collections import Counter

import numpy as np
import pytest
import torch

from foretoken.core.streams import Purpose

from .enumerate import AddressReused, Branching, Rest, autoregressive_law, exact_law, outcomes, total_variation
from .gtest import draws_for, draws_needed, g_test

COIN = torch.tensor([0.25, 0.75], dtype=torch.float64)


def test_every_branch_is_taken_once():
    def run(streams: Branching) -> tuple[object, ...]:
        stream = streams.private(Purpose.VERIFY, 0)
        first = stream.bernoulli(0.3, index=0)
        return (first, stream.categorical(COIN, index=0) if first else None)

    law = outcomes(run)
    assert law == pytest.approx({(False, None): 0.7, (True, 0): 0.075, (True, 1): 0.225}, abs=1e-15)


def test_impossible_outcomes_are_no_branches():
    one_hot = torch.tensor([0.0, 1.0])
    law = outcomes(
        lambda s: (s.private(Purpose.DRAFT, 0).categorical(one_hot, 0), s.private(Purpose.DRAFT, 0).bernoulli(1.0, 0))
    )
    assert law == {(1, True): 1.0}


@pytest.mark.parametrize("kind", ["bernoulli", "categorical"])
def test_an_address_asked_twice_fails(kind):
    def run(streams: Branching) -> int:
        for _ in range(2):
            stream = streams.private(Purpose.VERIFY, 4)
            stream.bernoulli(0.5, index=1) if kind == "bernoulli" else stream.categorical(COIN, index=1)
        return 0

    with pytest.raises(AddressReused):
        outcomes(run)


def test_the_rest_of_a_run_branches_without_the_draws_before_it():
    drawn = []

    def run(streams: Branching) -> Rest[tuple[int, bool]]:
        token = streams.private(Purpose.DRAFT, 0).categorical(COIN, index=0)
        drawn.append(token)
        return Rest(lambda rest: (token, rest.private(Purpose.VERIFY, 0).bernoulli(0.5, index=0)))

    law = outcomes(run)
    assert law == {(0, True): 0.125, (0, False): 0.125, (1, True): 0.375, (1, False): 0.375}
    assert drawn == [0, 1]


def test_the_rest_of_a_run_may_not_ask_an_address_again():
    def run(streams: Branching) -> Rest[int]:
        streams.private(Purpose.DRAFT, 0).categorical(COIN, index=0)
        return Rest(lambda rest: rest.private(Purpose.DRAFT, 0).categorical(COIN, index=0))

    with pytest.raises(AddressReused):
        outcomes(run)


def test_kinds_purposes_and_positions_are_different_addresses():
    def run(streams: Branching) -> int:
        for purpose in (Purpose.DRAFT, Purpose.VERIFY):
            for position in (0, 1):
                streams.private(purpose, position).bernoulli(0.5, index=0)
                streams.private(purpose, position).categorical(COIN, index=0)
        return 0

    assert outcomes(run) == {0: 1.0}


def test_shared_addresses_are_absolute():
    def run(streams: Branching) -> int:
        streams.shared(3).categorical(COIN, index=1)
        return streams.shared(4).categorical(COIN, index=0)

    with pytest.raises(AddressReused):
        outcomes(run)


def test_rounds_of_any_length_are_continued_and_cut():
    def emit(text, streams):  # one or two fair-to-COIN tokens per step
        stream = streams.private(Purpose.VERIFY, len(text))
        first = stream.categorical(COIN, index=0)
        return (first, stream.categorical(COIN, index=1)) if stream.bernoulli(0.5, index=0) else (first,)

    law = exact_law(emit, 3)
    reference = autoregressive_law(lambda text: COIN, 3)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-14)
    assert total_variation(law, reference) < 1e-14
    wrong = autoregressive_law(lambda text: COIN.flip(0), 3)
    assert total_variation(law, wrong) > 0.1


def test_ended_texts_go_no_further():
    law = exact_law(
        lambda text, s: (s.private(Purpose.VERIFY, len(text)).categorical(COIN, 0),), 2, lambda t: t[-1] == 0
    )
    assert law == pytest.approx({(0,): 0.25, (1, 0): 0.1875, (1, 1): 0.5625})


def test_missing_mass_counts():
    assert total_variation({(0,): 0.5}, {(0,): 1.0}) == 0.25


def test_numbers_of_another_round_fail():
    with pytest.raises(AddressReused):
        exact_law(lambda text, s: (s.private(Purpose.VERIFY, 0).categorical(COIN, 0),), 2)


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


def test_impossible_samples_have_p_value_zero():
    assert g_test(Counter("aab"), {"a": 1.0, "b": 0.0}).p_value == 0.0
    assert g_test(Counter("aab"), {"a": 1.0}).p_value == 0.0


def test_a_certain_law_is_passed_by_its_only_text():
    assert g_test(Counter("aaa"), {"a": 1.0}).p_value == 1.0


def test_no_draws():
    with pytest.raises(ValueError, match="no draws"):
        g_test({}, {"a": 1.0})
