"""Step times on toys whose clock is a function; chains of a draft model against verifiers and the papers' tables."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from tests.exactness.decode_step import PROMPT, Pair, constant, drawn, table
from tests.exactness.enumerate import outcomes

from foretoken.core.sampling import SamplingLaw
from foretoken.models.toy import ToyModel
from foretoken.plan.candidates import Candidate
from foretoken.plan.planner import PLAIN, Planner, PlanSettings, StepCosts, TimedBatch, TimedStep, time_prefill
from foretoken.plan.replay import TextProbabilities, step_starts, survival
from foretoken.plan.texts import SampledText
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.suffix import Lookup

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

    monkeypatch.setattr("foretoken.plan.planner.TimedBatch", Read)
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


def of(p, q) -> TextProbabilities:
    """A text by its probabilities."""
    text = SampledText((0,), (0,) * len(p), len(p))
    return TextProbabilities(text, np.array(p, dtype=float), np.array(q, dtype=float), fixed=False)


def steps(p, q, depth: int, rejection: str = "token") -> float:
    """Expected steps that emit the text."""
    return float(step_starts(survival(of(p, q), depth, rejection))[0].sum())


def tokens_per_pass(alpha: float, depth: int) -> float:
    return sum(alpha**k for k in range(depth + 1))


# 2211.17192, table 1: alpha, gamma, operations, speed; the draft costs nothing.
OPERATIONS_AND_SPEED = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]


@pytest.mark.parametrize("alpha, gamma, operations, speed", OPERATIONS_AND_SPEED)
def test_operations_and_speed_of_leviathan(alpha, gamma, operations, speed):
    assert (gamma + 1) / tokens_per_pass(alpha, gamma) == pytest.approx(operations, abs=0.005)
    assert tokens_per_pass(alpha, gamma) == pytest.approx(speed, abs=0.005)


@pytest.mark.parametrize(
    "alpha, gamma, speed", [(0.5, 3, 1.63), (0.6, 4, 1.92), (0.7, 6, 2.35), (0.8, 8, 3.09), (0.9, 13, 4.67)]
)
def test_best_depth_where_a_draft_step_costs_a_twentieth(alpha, gamma, speed):
    speeds = [tokens_per_pass(alpha, depth) / (1 + 0.05 * depth) for depth in range(40)]
    assert speeds.index(max(speeds)) == gamma and max(speeds) == pytest.approx(speed, abs=0.005)


# 2211.17192, expected improvement of T5-XXL: gamma, alpha, c, printed. Where the printed alpha and c give another digit
# the last column is False: theirs were not rounded yet.
T5_XXL = [
    (7, 0.75, 0.02, 3.2, True),
    (7, 0.80, 0.04, 3.3, True),
    (7, 0.82, 0.11, 2.5, True),
    (7, 0.62, 0.02, 2.3, True),
    (5, 0.68, 0.04, 2.4, False),
    (3, 0.71, 0.11, 2.0, False),
    (5, 0.65, 0.02, 2.4, True),
    (5, 0.73, 0.04, 2.6, True),
    (3, 0.74, 0.11, 2.0, True),
    (5, 0.53, 0.02, 1.9, True),
    (3, 0.55, 0.04, 1.8, True),
    (3, 0.56, 0.11, 1.6, False),
]


@pytest.mark.parametrize("gamma, alpha, c, printed, as_printed", T5_XXL)
def test_expected_improvement_of_leviathan(gamma, alpha, c, printed, as_printed):
    def speed(alpha: float, c: float) -> float:
        return tokens_per_pass(alpha, gamma) / (gamma * c + 1)

    assert (round(speed(alpha, c), 1) == printed) is as_printed
    assert speed(alpha - 0.005, c + 0.005) - 0.05 <= printed <= speed(alpha + 0.005, c - 0.005) + 0.05


# The mean over texts is what production verifiers do, by enumeration


@pytest.mark.parametrize("rejection", ["token", "block"])
@pytest.mark.parametrize("seed", range(2))
def test_survival_and_steps_given_the_text_are_unbiased(rejection, seed):
    length, depth, vocab = 4, 3, 2
    p, q = table(vocab, seed=seed, sharpness=1.5), table(vocab, seed=50 + seed, sharpness=1.5)
    pair = Pair(p, drawn(q), rejection=rejection, budget=lambda generated: depth)
    first, count = np.zeros(depth), 0.0
    for text in product(range(vocab), repeat=length):
        ours, drafts = ([float(m((*PROMPT, *text[:t])).softmax(-1)[text[t]]) for t in range(length)] for m in (p, q))
        mass = np.prod(ours)
        first += mass * survival(of(ours, drafts), depth, rejection)[1:, 0]
        count += mass * steps(ours, drafts, depth, rejection)
    law = outcomes(lambda streams: len(pair.emit((), streams)), position=0)
    survived = [sum(chance for n, chance in law.items() if n > k) for k in range(1, depth + 1)]
    assert first.tolist() == pytest.approx(survived, abs=1e-6)
    assert count == pytest.approx(expected_steps(pair, length), abs=1e-6)


def expected_steps(pair: Pair, length: int) -> float:
    """Returns the steps until ``length`` tokens are emitted, by running every text through production code."""
    waiting: list[dict[tuple[int, ...], float]] = [{} for _ in range(length)]
    waiting[0][()] = 1.0
    total = 0.0
    for reached in range(length):
        for text, chance in waiting[reached].items():
            total += chance
            for emitted, p in outcomes(lambda s, text=text: pair.step(text, s), position=reached).items():
                longer = text + emitted
                if len(longer) < length:
                    waiting[len(longer)][longer] = waiting[len(longer)].get(longer, 0.0) + chance * p
    return total


def test_a_text_both_models_agree_on_takes_its_length_over_a_full_step():
    same = np.random.default_rng(0).random(12) * 0.9 + 0.05
    assert steps(same, same, 3) == 3.0
    assert steps(same, np.zeros(12), 3, "block") == 12.0


def test_correlated_acceptance_is_not_what_its_mean_says():
    """Half of the text is easy and half impossible: steps of the mean chance would be fewer than there are."""
    p = np.full(200, 0.5)
    count = steps(p, [0.5] * 100 + [0.0] * 100, 4)
    assert count == pytest.approx(100 / 5 + 100, abs=1)
    assert 200 / count < tokens_per_pass(0.5, 4)


def test_extreme_ratios_neither_overflow_nor_hide_a_later_rejection():
    text = of([1e-38] * 12 + [1.0], [1.0] * 12 + [0.0])
    assert survival(text, 13)[:, 0].tolist() == [1.0] * 13 + [0.0]


def test_block_toy_of_the_paper_on_its_own_texts():
    """2403.10444: p = (1/3, 2/3), q = (2/3, 1/3), gamma = 2; 10/9 and 11/9 accepted."""
    p, q = (model(()).softmax(-1).tolist() for model in (constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)))
    for rejection, expected in (("token", 10 / 9), ("block", 11 / 9)):
        total = 0.0
        for a, b in product(range(2), repeat=2):
            reach = survival(of([p[a], p[b]], [q[a], q[b]]), 2, rejection)
            total += p[a] * p[b] * reach[1:, 0].sum()
        assert total == pytest.approx(expected, abs=1e-12)
