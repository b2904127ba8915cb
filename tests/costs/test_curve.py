from __future__ import annotations

import pytest

from foretoken.costs.curve import Curve


def of(points: dict[int, float], times: int = 8, origin: bool = False) -> Curve:
    curve = Curve(origin=origin)
    for size, seconds in points.items():
        for _ in range(times):
            curve.add(size, seconds)
    return curve


def test_nothing_measured_takes_no_time():
    assert Curve().at(4) == 0.0
    assert Curve().weight_near(1) == 0.0


def test_jags_are_kept():
    curve = Curve()
    for _ in range(40):  # the jump is more than a disturbance, so it takes a while to be believed
        for size, seconds in ((1, 1.0), (8, 1.2), (9, 2.0), (16, 2.1)):
            curve.add(size, seconds)
    assert [round(curve.at(size), 2) for size in (1, 8, 9, 16)] == [1.0, 1.2, 2.0, 2.1]


def test_between_sizes_a_line_and_beyond_the_slope_of_all():
    curve = of({2: 1.0, 4: 1.2})
    assert curve.at(3) == pytest.approx(1.1)
    assert curve.at(8) == pytest.approx(1.6)
    assert curve.at(1) == pytest.approx(0.9)
    assert curve.at(2.5) == pytest.approx(1.05)


def test_one_size_gives_a_slope():
    assert of({1: 1.0}).at(5) == pytest.approx(1.12)
    assert of({4: 1.0}, origin=True).at(2) == pytest.approx(0.5)
    assert of({4: 1.0}, origin=True).at(8) == pytest.approx(2.0)


def test_more_never_takes_less_beyond_what_was_measured():
    curve = of({1: 1.0, 4: 0.9})
    assert curve.at(40) == pytest.approx(0.95)


def test_that_more_seems_to_take_less_is_chance():
    curve = of({1: 1.0, 4: 1.2, 5: 1.0, 8: 1.4})
    assert [curve.between(size) for size in (1.0, 4.0, 4.5, 5.0, 8.0)] == pytest.approx([1.0, 1.1, 1.1, 1.1, 1.4])


def test_below_the_smallest_nothing_takes_less_than_its_share():
    """A steep line through 3 and 4 would say that two take nothing; then what two took would count as nothing."""
    curve = of({3: 1.0, 4: 2.0}, times=2)
    assert curve.at(2) == pytest.approx(2 / 3)
    curve.add(2, 0.9)
    assert curve.at(2) == pytest.approx(0.9)


def test_a_passing_disturbance_hardly_shows():
    curve = of({1: 1.0})
    curve.add(1, 50.0)
    assert curve.at(1) < 1.2


def test_lasting_change_gets_through():
    curve = of({1: 1.0}, times=100)
    for _ in range(16):
        curve.add(1, 10.0)
    assert curve.at(1) == pytest.approx(10.0, rel=0.15)
    for _ in range(80):
        curve.add(1, 1.0)
    assert curve.at(1) < 1.6


def test_doubted_measurements_give_way():
    curve = of({1: 1.0}, times=30)
    curve.discount(0.5)
    curve.add(1, 1.3)
    assert curve.at(1) > 1.15


def test_known_within_some_slack():
    curve = of({16: 1.0}, times=2)
    assert curve.weight_near(15) == 0.0
    assert curve.weight_near(15, slack=1) == 2.0


def test_many_sizes_at_once():
    curve = of({1: 1.0, 100: 100.0}, times=1)
    assert [curve.between(size) for size in (1.0, 50.0, 200.0)] == pytest.approx([1.0, 50.0, 200.0])
