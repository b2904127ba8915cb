"""Step times of the real engine on toys, whose clock is a function."""

from collections.abc import Callable, Sequence

import pytest

from foretoken.core.sampling import SamplingLaw
from foretoken.models.toy import ToyModel
from foretoken.plan.candidates import Candidate
from foretoken.plan.planner import Planner, PlanSettings
from foretoken.plan.step_costs import PLAIN, StepCosts, TimedBatch, TimedStep, time_prefill
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.lookup import Lookup

WARM = SamplingLaw()
FULL = {4: 1.0}


def toy(**options) -> ToyModel:
    return ToyModel(vocab_size=6, order=2, seed=3, sharpness=1.5, **options)


@pytest.fixture
def clock(monkeypatch):
    """Sets the seconds of a step's pass by its rows, and of drafting by its depth. Returns the depths of all steps."""
    depths: list[int] = []
    real = TimedBatch.step

    def use(rows: Callable[[int], float], propose: Callable[[int], float] = lambda depth: 0.1) -> list[int]:
        def step(self, depth):
            size = real(self, depth).rows
            depths.append(depth)
            drafting = propose(depth) if depth else 0.0
            return TimedStep(drafting + rows(size), drafting, size)

        monkeypatch.setattr(TimedBatch, "step", step)
        return depths

    return use


def measured(costs: StepCosts, depths: Sequence[int] = (4,), batch: int = 1, steps: int = 3) -> StepCosts:
    target = toy()
    costs.time(target, DraftModel(target.perturbed(0.3)), depths, [(1, 2, 3)] * batch, WARM, steps)
    return costs


def test_a_step_is_its_pass_and_its_drafting(clock):
    """Five rows take 2, one takes 1, drafting 0.1: plain steps are timed in the midst of all draft lengths."""
    depths = clock(lambda rows: {1: 1.0, 3: 1.5, 5: 2.0}[rows])
    time = measured(StepCosts(), (2, 4)).of(4, 1, FULL)
    assert time.plain == pytest.approx(1.0) and time.propose == pytest.approx(0.1)
    assert time.seconds == pytest.approx(2.1) and time.error == pytest.approx(0.01)
    assert depths == [2] * 5 + [0] * 5 + [4] * 5
    clock(lambda rows: 0.003)  # plain steps are so short that the processor needs more of them to settle
    measured(StepCosts())
    assert depths[15:] == [0] * 7 + [4] * 5


def test_draft_lengths_between_the_timed_ones_are_interpolated(clock):
    clock(lambda rows: 1.0 + 0.25 * (rows - 1), lambda depth: 0.1 * depth)
    costs = measured(StepCosts(), (1, 2, 4, 8))
    assert [costs.of(depth, 1, {depth: 1.0}).seconds for depth in (2, 3, 6)] == pytest.approx([1.7, 2.05, 3.1])


def test_steps_that_draft_less_have_fewer_rows(clock):
    """Passes of 1, 2 and 5 rows take 1, 1.25 and 2. A text ends, or lookup finds nothing, in every fourth step."""
    clock(lambda rows: 1.0 + 0.25 * (rows - 1))
    costs = measured(StepCosts())
    assert costs.of(4, 1, {4: 0.75, 1: 0.25}).seconds == pytest.approx(0.1 + 0.75 * 2.0 + 0.25 * 1.25)
    assert costs.of(4, 1, {0: 0.75, 4: 0.25}).seconds == pytest.approx(0.1 + 0.75 * 1.0 + 0.25 * 2.0)


def test_batches_are_timed_by_all_of_their_rows(clock):
    clock(lambda rows: 1.0 + 0.125 * (rows - 2))
    costs = measured(StepCosts(), batch=2)
    assert costs.of(4, 2, {0: 0.75, 4: 0.25}).seconds == pytest.approx(0.1 + 0.75 * 1.0 + 0.25 * 2.0)


def test_a_slower_machine_changes_no_ratio_and_moments_that_differ_are_an_error(clock):
    """At the second moment all takes twice as long; at the third, drafting alone."""
    costs = StepCosts()
    for speed, propose in ((1.0, 0.1), (2.0, 0.2)):
        clock(lambda rows, speed=speed: speed * (1.0 + 0.25 * (rows - 1)), lambda depth, propose=propose: propose)
        measured(costs)
    same = costs.of(4, 1, FULL)
    assert same.seconds / same.plain == pytest.approx(2.1) and same.error == pytest.approx(0.01)
    assert same.plain == pytest.approx(1.5)
    clock(lambda rows: 1.0 + 0.25 * (rows - 1), lambda depth: 1.0)
    other = measured(costs).of(4, 1, FULL)
    assert other.seconds / other.plain == pytest.approx((2.1 + 2.1 + 3.0) / 3) and other.error > 0.1
    assert 0.0 < other.propose < other.seconds


def test_a_disturbed_step_does_not_count(clock):
    """One of many steps takes ten times as long, of either kind."""
    for disturbed in (1, 5):
        once = iter([10.0])
        clock(
            lambda rows, at=disturbed, once=once: (2.0 if rows == 5 else 1.0) * (next(once, 1.0) if rows == at else 1)
        )
        costs = measured(StepCosts(), steps=8)
        assert costs.of(4, 1, FULL).seconds / costs.of(4, 1, FULL).plain == pytest.approx(2.1, rel=0.1)


def test_prefill_is_timed_beside_plain_prefill(monkeypatch):
    """The first, which reads weights that no process has read, does not count."""
    seconds, order = iter([9.0, 9.0, 2.0, 3.0, 2.0, 3.0, 2.0, 4.0]), []

    class Read:
        def __init__(self, target, proposer, prompts, law):
            order.append(type(proposer))
            self.prefill = next(seconds)

        def close(self):
            pass

    monkeypatch.setattr("foretoken.plan.step_costs.TimedBatch", Read)
    assert time_prefill(toy(), {"a": Lookup()}, [(1, 2, 3)], WARM) == {PLAIN: 2.0, "a": 3.0}
    assert order == [Proposer, Lookup] * 4


def test_batches_go_on_where_a_sequence_ends_and_leave_nothing_open():
    short = toy(max_length=24)
    costs = StepCosts()
    for proposer, depths in ((Lookup(), (4,)), (DraftModel(short.perturbed(0.3)), (1, 3))):
        costs.time(short, proposer, depths, [(1, 2, 3)] * 2, WARM, 30)
    assert all(moment.pass_seconds(2) > 0 for moment in costs.moments)
    assert short.num_open == 0
    batch = TimedBatch(short, Proposer(), [(1, 2, 3)] * 20, WARM)
    assert batch.step(0).rows == 20 and batch.prefill > 0


def test_a_plan_times_every_candidate_at_several_moments(monkeypatch):
    timed: list[tuple[int, int, int]] = []
    real = StepCosts.time

    def time(self, target, proposer, depths, prompts, law, steps):
        timed.append((len(depths), len(prompts), steps))
        real(self, target, proposer, depths, prompts, law, steps)

    monkeypatch.setattr(StepCosts, "time", time)
    settings = PlanSettings(temperatures=(0.0, 1.0), batches=(1, 3), max_tokens=12, turns=3)
    chosen = [Candidate("ngram", {"method": "ngram"}, (2, 4)), Candidate("lookup", {"method": "ngram"}, (3,))]
    Planner(toy(), lambda config: Lookup(), settings).plan([(1, 2, 3)], chosen)
    visits = [(2, 1), (1, 1), (2, 3), (1, 3)]
    assert timed == [(*each, steps) for _ in range(2) for steps in (1, 2) for each in visits]
