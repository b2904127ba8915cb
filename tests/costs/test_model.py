"""Seconds of passes by rows, on a machine whose speed changes, and the curve through measured passes."""

import pytest

from foretoken.core.draft import Draft
from foretoken.core.step import StepOutput, Timings
from foretoken.core.verdict import Verdict
from foretoken.costs.curve import Curve
from foretoken.costs.model import CostModel


def seconds(rows: int) -> float:
    """Seven rows take hardly more than one, and eight much more."""
    return 0.030 if rows < 8 else 0.045


def learned(*sizes: int) -> CostModel:
    costs = CostModel()
    for _ in range(6):
        for rows in sizes:
            costs.observe_pass(rows, seconds(rows))
    return costs


def step(rows: int, taken: float, position: int = 5) -> list[StepOutput]:
    draft = Draft.chain([0] * (rows - 1))
    return [StepOutput(0, position, draft, Verdict((), 0), (0,), Timings(0.5, taken, 0.0, 0.0, 1))]


def test_nothing_is_known_at_first():
    costs = CostModel()
    assert not costs.known and costs.pass_seconds(4) == 0.0
    assert costs.pass_ratio(4.0, 1) == 1.0


def test_a_slower_machine_makes_no_size_dearer_than_another():
    costs = learned(1, 7, 8, 16)
    for _ in range(12):  # of the others nothing is seen
        costs.observe_pass(7, 2.0 * seconds(7))
    assert costs.pass_seconds(7) == pytest.approx(2.0 * seconds(7), rel=0.01)
    assert costs.pass_seconds(16) == pytest.approx(2.0 * seconds(16), rel=0.1)  # a little of it is thought to be theirs
    assert [costs.pass_ratio(rows, 1) for rows in (7.0, 8.0)] == pytest.approx([1.0, 1.5], rel=0.11)


def test_what_displaced_caches_cost_is_a_cost_of_drafting():
    """A pass behind drafting takes half as long again, and so do the next plain steps, less and less."""
    costs = CostModel()
    costs.calibrate({1: 0.045, 3: 0.0495}, {2: 0.005}, settled=0.030)
    since = 12
    for number in range(1000):
        due = costs.plain_due(1)
        since, depth = (since + 1, 0) if due else (0, 2)
        slower = 1.0 + 0.5 * max(0.0, 1.0 - since / 12) ** 2
        timings, draft = Timings(0.0025 * depth, 0.030 * (1.1 if depth else 1.0) * slower, 0.0, 0.0, 1), [0] * depth
        costs.observe([StepOutput(0, 5, Draft.chain(draft), Verdict((), 0), (0,) * (1 + depth), timings, budget=depth)])
        assert costs.plain_seconds(1) == pytest.approx(0.030, rel=0.02), number
    assert costs.pass_ratio(3.0, 1) == pytest.approx(1.1, rel=0.02)
    assert costs.drafting.seconds(2, 1) == pytest.approx(0.005 + 0.0165, rel=0.05)


def test_displaced_caches_are_noticed_without_a_warm_up():
    """Drafting does not look profitable for long because plain steps were only timed behind drafts."""
    costs, since = learned(1, 3), 12
    for _ in range(600):
        since, depth = (since + 1, 0) if costs.plain_due(1) else (0, 2)
        slower = 1.0 + 0.5 * max(0.0, 1.0 - since / 12) ** 2
        timings = Timings(0.0025 * depth, 0.030 * slower, 0.0, 0.0, 1)
        draft = Draft.chain([0] * depth)
        costs.observe([StepOutput(0, 5, draft, Verdict((), 0), (0, 0), timings, budget=depth)])
    assert costs.plain_seconds(1) == pytest.approx(0.030, rel=0.1)


def test_prefill_of_others_keeps_no_request_from_drafting():
    costs, plain = learned(1, 3), 0
    for number in range(2000):
        due = costs.plain_due(1)
        plain += due and number > 500
        draft, position = Draft.chain([0] * (0 if due else 2)), 5 * (number % 8 > 0)
        timings = Timings(0.002, 0.030, 0.0, 0.0, 1)
        costs.observe([StepOutput(0, position, draft, Verdict((), 0), (0, 0), timings, budget=len(draft))])
    assert plain < 0.1 * 1500


@pytest.mark.parametrize(("tokens", "most"), [(1, 0.4), (2, 0.1), (4, 0.05)])
def test_plain_steps_are_timed_in_a_small_share_of_the_steps(tokens: int, most: float):
    costs, plain = CostModel(), 0
    for number in range(4000):
        due = costs.plain_due(1)
        plain += due and number > 500
        timings, draft = Timings(0.002, 0.030, 0.0, 0.0, 1), Draft.chain([0] * (0 if due else 4))
        emitted = (0,) * (1 if due else tokens)
        costs.observe([StepOutput(0, 5, draft, Verdict((), 0), emitted, timings, budget=len(draft))])
    assert plain < most * 3500


def test_one_step_that_took_far_too_long_teaches_nothing_and_three_do():
    costs = learned(1, 4)
    for _ in range(2):
        costs.observe_pass(4, 3.0)
    assert costs.pass_seconds(4) == pytest.approx(seconds(4))
    for _ in range(20):
        costs.observe_pass(4, 3.0)
    assert costs.pass_seconds(1) > 10 * seconds(1)


def test_more_rows_in_less_time_tell_of_a_faster_machine():
    """The first pass over 24 rows comes just when everything takes two thirds."""
    costs = learned(1, 16)
    costs.observe_pass(24, seconds(24) / 1.5)
    assert costs.level == pytest.approx(1 / 1.5, rel=0.01)
    assert costs.pass_ratio(24.0, 16) == pytest.approx(1.0)


def test_rows_beyond_those_that_were_tried_cost_what_the_curve_says():
    costs = learned(1, 7, 8)
    assert costs.pass_ratio(20.0, 1) > 2.0


def drafted(costs: CostModel, depth: int, propose: float, missed: int = 0) -> None:
    """One step that drafts ``depth`` tokens."""
    timings = Timings(propose, 0.03, 0.0, 0.0, 1, missed_tokens=missed)
    costs.observe([StepOutput(0, 5, Draft.chain([0] * depth), Verdict((), 0), (0,), timings, budget=depth)])


def test_one_catching_up_that_took_far_too_long_teaches_nothing_and_three_do():
    costs = CostModel()
    for _ in range(4):
        drafted(costs, 4, 0.004)
        drafted(costs, 4, 0.004 + 0.001, missed=100)
    usual = costs.drafting.missed(100)
    assert usual == pytest.approx(0.001, rel=0.3)
    for _ in range(2):
        drafted(costs, 4, 2.0, missed=100)
    assert costs.drafting.missed(100) == pytest.approx(usual)
    for _ in range(4):
        drafted(costs, 4, 2.0, missed=100)
    assert costs.drafting.missed(100) > 0.5


def test_the_faster_of_two_times_of_catching_up_counts_after_the_warm_up():
    costs = CostModel()
    drafted(costs, 1, 2.0, missed=32)
    costs.calibrate({}, {1: 0.001}, missed=0.0001)
    assert costs.drafting.missed(10) == pytest.approx(0.001)


def test_a_warm_up_that_other_programs_delayed_is_corrected_by_the_first_draft():
    costs = CostModel()
    costs.calibrate({1: 0.03}, {1: 0.1, 4: 0.4})
    drafted(costs, 1, 0.01)
    assert costs.drafting.seconds(1, 1) == pytest.approx(0.01)
    assert costs.drafting.seconds(4, 1) == pytest.approx(0.04)
    drafted(costs, 1, 0.001)  # later drafts are averaged
    assert 0.004 < costs.drafting.seconds(1, 1) < 0.01


def test_only_what_is_no_prompt_and_no_drafting_counts():
    costs = CostModel()
    step_ = step(4, 0.03)
    costs.observe(step(4, 9.0, position=0))
    costs.observe([])
    costs.observe(step(2, 0.0))  # without a clock
    assert not costs.known
    costs.observe(step_)
    costs.observe(step(4, 9.0, position=0))
    costs.observe(step(2, 0.0))
    assert costs.pass_seconds(4) == pytest.approx(0.03)


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
