"""The papers' printed tables, from theory alone; and the forms for acceptance that varies, against enumeration."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exactness.decode_step import PROMPT, Pair, constant, drawn, table
from tests.exactness.enumerate import Branching, outcomes

from foretoken.core.errors import InvalidRequest
from foretoken.plan.formulas import theory

chances = st.lists(st.floats(0, 1), max_size=6)
relaxed = settings(max_examples=25, deadline=None, derandomize=True)

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
    assert theory.operations(alpha, gamma) == pytest.approx(operations, abs=0.005)
    assert theory.speedup(theory.tokens_per_pass(alpha, gamma), gamma, 0.0) == pytest.approx(speed, abs=0.005)


@pytest.mark.parametrize(
    "alpha, gamma, speed", [(0.5, 3, 1.63), (0.6, 4, 1.92), (0.7, 6, 2.35), (0.8, 8, 3.09), (0.9, 13, 4.67)]
)
def test_best_depth_where_a_draft_step_costs_a_twentieth(alpha, gamma, speed):
    best = theory.best_depth([alpha] * 40, 0.05)
    assert best.depth == gamma
    assert best.speedup == pytest.approx(speed, abs=0.005)


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
        return theory.speedup(theory.tokens_per_pass(alpha, gamma), gamma, c)

    assert (round(speed(alpha, c), 1) == printed) is as_printed
    assert speed(alpha - 0.005, c + 0.005) - 0.05 <= printed <= speed(alpha + 0.005, c - 0.005) + 0.05


# Tokens per pass


@relaxed
@given(st.floats(0, 0.98), st.integers(0, 12))
def test_sums_are_the_closed_forms(a, g):
    variance = (a - (2 * g + 1) * a ** (g + 1) * (1 - a) - a ** (2 * g + 2)) / (1 - a) ** 2
    assert theory.tokens_per_pass(a, g) == pytest.approx((1 - a ** (g + 1)) / (1 - a), rel=1e-12)
    assert theory.tokens_variance(a, g) == pytest.approx(variance, rel=1e-8, abs=1e-9)


@relaxed
@given(chances)
def test_mean_and_variance_by_enumerating_steps(chances):
    def run(streams: Branching) -> int:
        stream = streams.private(1, 0)  # type: ignore[arg-type]
        for position, chance in enumerate(chances):
            if not stream.bernoulli(chance, position):
                return position + 1
        return len(chances) + 1

    law = outcomes(run)
    mean = sum(n * p for n, p in law.items())
    assert theory.expected_tokens(chances) == pytest.approx(mean, abs=1e-12)
    assert theory.variance(chances) == pytest.approx(sum((n - mean) ** 2 * p for n, p in law.items()), abs=1e-10)


def test_a_draft_that_is_always_right_yields_all_and_never_varies():
    assert theory.tokens_per_pass(1.0, 7) == 8.0
    assert theory.tokens_variance(1.0, 7) == 0.0
    assert theory.tokens_per_pass(0.7, 0) == 1.0


# Speed


def test_a_measured_curve_may_be_jagged_and_every_depth_is_checked():
    curve = {1: 10.0, 2: 11.0, 3: 19.0, 4: 20.0, 5: 12.0, 6: 30.0}
    speeds = [result.speedup for result in theory.depths([0.6] * 5, 0.05, curve.__getitem__)]
    assert speeds[0] == 1.0
    assert speeds[1] > speeds[2] < speeds[4]
    best = theory.best_depth([0.6] * 5, 0.05, curve.__getitem__)
    assert best.depth == 4
    assert best.speedup == pytest.approx(best.tokens / (4 * 0.05 + 1.2))


@relaxed
@given(st.floats(0, 1), st.floats(0, 1.5))
def test_a_flat_pass_pays_exactly_where_alpha_exceeds_the_cost(alpha, c):
    best = theory.best_depth([alpha] * 6, c)
    assert best.speedup >= theory.min_speedup(alpha, c) - 1e-12
    assert (best.depth > 0) <= (alpha > c)
    assert (alpha > c + 1e-9) <= (best.depth > 0)


def test_operations_count_the_drafts_own():
    assert theory.operations(0.8, 5, 0.1) == pytest.approx(0.2 * (5 * 0.1 + 6) / (1 - 0.8**6))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: theory.tokens_per_pass(1.2, 3),
        lambda: theory.tokens_per_pass(0.5, -1),
        lambda: theory.expected_tokens([0.5, -0.1]),
        lambda: theory.speedup(2.0, 3, -0.1),
        lambda: theory.speedup(2.0, 3, 0.1, lambda rows: 0.0),
        lambda: theory.conditional_acceptance([1, 2], [3]),
        lambda: theory.conditional_acceptance([4], [3]),
        lambda: theory.text_survival(torch.ones(3), torch.ones(2), 2),
    ],
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(InvalidRequest):
        wrong()


# Estimates


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_conditional_acceptance_does_not_fall_with_the_depth(depth):
    alpha = 0.75
    counts = [round(4**depth * (alpha**k * (1 - alpha) if k < depth else alpha**k)) for k in range(depth + 1)]
    accepted = [k for k, count in enumerate(counts) for _ in range(count)]
    drafted = [depth] * len(accepted)
    assert theory.conditional_acceptance(accepted, drafted) == pytest.approx(alpha, abs=1e-12)
    assert theory.acceptance_by_position(accepted, drafted) == pytest.approx([alpha] * depth, abs=1e-12)
    assert (sum(accepted) / sum(drafted) < alpha - 0.05) is (depth > 1)


def test_nothing_verified_is_no_estimate():
    assert theory.conditional_acceptance([], []) is None
    assert theory.conditional_acceptance([0], [0]) is None
    assert theory.acceptance_by_position([0, 0], [1, 3]) == [0.0, None, None]


# Acceptance that depends on the text: the mean over texts is what production verifiers do, by enumeration


@pytest.mark.parametrize("rejection", ["token", "block"])
@pytest.mark.parametrize("seed", range(2))
def test_survival_and_steps_given_the_text_are_unbiased(rejection, seed):
    length, depth, vocab = 4, 3, 2
    p, q = table(vocab, seed=seed, sharpness=1.5), table(vocab, seed=50 + seed, sharpness=1.5)
    pair = Pair(p, drawn(q), rejection=rejection, budget=lambda generated: depth)
    first, steps = torch.zeros(depth, dtype=torch.float64), 0.0
    for text in product(range(vocab), repeat=length):
        distributions = [[float(m((*PROMPT, *text[:t])).softmax(-1)[text[t]]) for t in range(length)] for m in (p, q)]
        reach = theory.text_survival(*map(torch.tensor, distributions), depth, block=rejection == "block")
        mass = torch.tensor(distributions[0], dtype=torch.float64).prod()
        first += mass * reach[0]
        steps += float(mass) * theory.text_steps(reach)
    law = outcomes(lambda streams: len(pair.emit((), streams)), position=0)
    survived = [sum(chance for n, chance in law.items() if n > k) for k in range(1, depth + 1)]
    assert first.tolist() == pytest.approx(survived, abs=1e-6)
    assert steps == pytest.approx(expected_steps(pair, length), abs=1e-6)


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
    same = torch.rand(12, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.05
    reach = theory.text_survival(same, same, 3)
    assert theory.text_steps(reach) == 3.0
    never = theory.text_survival(same, torch.zeros(12), 3, block=True)
    assert theory.text_steps(never) == 12.0


def test_correlated_acceptance_is_not_what_its_mean_says():
    """Half of the text is easy and half impossible: steps of the mean chance would be fewer than there are."""
    p = torch.full((200,), 0.5)
    q = torch.cat([p[:100], torch.zeros(100)])
    steps = theory.text_steps(theory.text_survival(p, q, 4))
    assert steps == pytest.approx(100 / 5 + 100, abs=1)
    assert 200 / steps < theory.tokens_per_pass(0.5, 4)


def test_block_toy_of_the_paper_on_its_own_texts():
    """2403.10444: p = (1/3, 2/3), q = (2/3, 1/3), gamma = 2; 10/9 and 11/9 accepted."""
    p, q = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)
    for block, expected in ((False, 10 / 9), (True, 11 / 9)):
        total = 0.0
        for text in product(range(2), repeat=2):
            distributions = [torch.stack([m(()).softmax(-1)[x] for x in text]) for m in (p, q)]
            total += float(distributions[0].prod() * theory.text_survival(*distributions, 2, block=block)[0].sum())
        assert total == pytest.approx(expected, abs=1e-12)
