"""The enumerator itself: its sums, its scruples, and that it can tell a wrong law from a right one."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.streams import Purpose

from .enumerate import AddressReused, Branching, Rest, autoregressive_law, exact_law, outcomes, total_variation

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
