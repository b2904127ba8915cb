"""Acceptance by draft position is counted one way for steps, expectations and sums."""

from __future__ import annotations

import pytest

from foretoken.core.positions import PositionCounts


def test_a_step_counts_at_every_position_that_it_drafted():
    counts = PositionCounts()
    counts.add(3, 1)
    counts.add(1, 1)
    counts.add(0, 0)
    assert counts.drafted == [2, 1, 1] and counts.accepted == [2, 0, 0]
    assert counts.rates == (1.0, 0.0, 0.0)


def test_expectations_are_the_mean_of_steps():
    steps, expected = PositionCounts(), PositionCounts()
    for accepted in (0, 1, 1, 2):
        steps.add(2, accepted)
    expected.add_expected(2, [0.75, 0.25], 4.0)
    assert expected.drafted == steps.drafted and expected.accepted == pytest.approx(steps.accepted)


def test_sums_are_of_any_lengths():
    one, other = PositionCounts(), PositionCounts()
    one.add(1, 1)
    other.add(2, 1)
    one.merge(other)
    assert one == PositionCounts([2, 1], [2, 0])
    assert PositionCounts([0.0], [0.0]).rates == (0.0,)
