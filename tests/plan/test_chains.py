"""Steps of a draft model's chains, given a text, against production verifiers; and the papers' printed tables."""

from itertools import product

import numpy as np
import pytest
from tests.exactness.decode_step import PROMPT, Pair, constant, drawn, table
from tests.exactness.enumerate import outcomes

from foretoken.plan.sample import TextProbabilities, step_starts, survival
from foretoken.plan.texts import SampledText


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
