"""Series: the law of what comes out, by quadrature through the production verifier and by KS tests of trajectories.

A stand-in stream answers each question both ways and notes the chances, so that densities of whole rounds are had
without drawing anything. What is wrong on purpose must be found by the same checks.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

import continuous_verifier
from continuous_verifier import Gaussians, Origin, SeededReals, SeriesDraft, SeriesVerdict, overlap, verify
from foretoken.core.streams import Purpose, Streams, random_seed_from

from .quadrature import STEPS, Scripted, Step, Verify, rows

pytestmark = pytest.mark.slow

LIMIT = 1e-9
ALPHA = 1e-3  # of each KS test; seeds are fixed, so that a pass stays one
GRID = np.linspace(-4.3, 4.9, 47)


def one_step_error(step: Step, rule: Verify = verify) -> float:
    """The largest distance between the density of what comes out and p, relative to p's peak."""
    refused = None if step.p[1] == step.q[1] else step.refusals(rule)
    grid = step.p[0] + step.p[1] * GRID
    peak = step.density(step.p, step.p[0])
    return max(abs(step.out(rule, y, refused) - step.density(step.p, y)) for y in grid) / peak


@pytest.mark.parametrize("name", STEPS)
def test_one_value_has_the_targets_density(name):
    assert one_step_error(STEPS[name]) < LIMIT


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("t", [0.0, 0.7, 2.1])
def test_one_values_characteristic_function_is_the_targets(name, t):
    """The same by integrating over what is drafted: no density of the outcome is needed."""
    step = STEPS[name]
    ratio = None if step.p[1] == step.q[1] else step.refusals(verify)

    def reflected(x: float) -> float:
        stands = step.stands(verify, x)
        y = float(step.run(verify, x, [False])[0].value[0])
        return step.density(step.q, x) * (stands * math.cos(t * x) + (1.0 - stands) * math.cos(t * y))

    def stood(x: float) -> float:
        return step.density(step.q, x) * step.stands(verify, x) * math.cos(t * x)

    def drawn(y: float) -> float:
        return step.density(step.p, y) * step.run(verify, y, [False, True], y)[1][1] * math.cos(t * y)

    result = step.integral(reflected) if ratio is None else step.integral(stood) + ratio * step.integral(drawn)
    mu, sigma = step.p
    assert result == pytest.approx(math.cos(t * mu) * math.exp(-((t * sigma) ** 2) / 2), abs=LIMIT)


@pytest.mark.parametrize("name", STEPS)
def test_a_draft_is_accepted_as_often_as_the_distributions_overlap(name):
    step = STEPS[name]
    accepted = step.integral(lambda x: step.density(step.q, x) * step.stands(verify, x))
    common = step.integral(lambda x: min(step.density(step.p, x), step.density(step.q, x)))
    assert accepted == pytest.approx(common, abs=LIMIT)
    if step.p[1] == step.q[1]:
        gap = (step.q[0] - step.p[0]) / step.p[1]
        assert accepted == pytest.approx(2.0 * stats.norm.cdf(-abs(gap) / 2.0), abs=LIMIT)
        assert overlap(rows(step.p), rows(step.q), 0) == pytest.approx(accepted, abs=LIMIT)


# Two values: y1 ~ p, y2 ~ p(. | y1), wherever steps begin


def second(y: float) -> Step:
    """The distributions of the second value after a first one, on which both means depend."""
    return Step((0.8 * y - 0.1, 1.0), (0.5 * math.tanh(y) + 0.2, 1.0))


def two_steps_error(rule: Verify = verify) -> float:
    """The largest distance between the joint density of the first two values and p p, over a grid.

    Accepted, then accepted or refused, in one round; or refused, and then the first value of a round of its own.
    """
    first = STEPS["equal scales"]
    worst = 0.0
    for y1 in GRID[::4]:
        below = second(y1)
        source = float(first.run(rule, y1, [False])[0].value[0])
        for y2 in GRID[::4]:
            mirrored = float(below.run(rule, y2, [False])[0].value[0])
            in_round = two_values(rule, first, y1, y2, [True, True]) + two_values(
                rule, first, y1, mirrored, [True, False]
            )
            refused = first.density(first.q, source) * (1.0 - first.stands(rule, source))
            result = in_round + refused * below.out(rule, y2)
            worst = max(worst, abs(result - first.density(first.p, y1) * below.density(below.p, y2)))
    return worst


def two_values(rule: Verify, first: Step, x1: float, x2: float, answers: list[bool]) -> float:
    """The density of drafting (x1, x2) and of the verdict going as ``answers`` say."""
    below = second(x1)
    stream = Scripted(answers)
    draft = SeriesDraft(np.array([[x1], [x2]]), rows(first.q, below.q))
    verdict = rule(draft, rows(first.p, below.p, (0.0, 1.0)), stream)
    assert verdict.accepted == sum(answers)
    return first.density(first.q, x1) * below.density(below.q, x2) * math.prod(stream.chances)


def test_two_values_have_the_targets_joint_density():
    assert two_steps_error() < LIMIT


def test_two_values_stand_as_often_as_the_drafts_path_overlaps():
    """Both stand: by quadrature over the second value, below several first ones, against the overlap's closed form."""
    first = STEPS["equal scales"]

    def by_overlap(x: float) -> float:
        below = second(x)
        return first.density(first.q, x) * first.stands(verify, x) * overlap(rows(below.p), rows(below.q), 0)

    def by_drafting(x1: float) -> float:
        return second(x1).integral(lambda x2: two_values(verify, first, x1, x2, [True, True]))

    nodes = np.linspace(-3.0, 3.0, 7)
    for x in nodes:
        assert by_drafting(x) == pytest.approx(by_overlap(x), abs=LIMIT)


def test_several_coordinates_are_mirrored_along_the_line_between_the_means():
    """In the plane: densities at a cloud of points, and the reflection its own inverse."""
    p = Gaussians(np.array([[0.2, -0.4]] * 2), np.array([[1.0, 0.5]] * 2))
    q = Gaussians(np.array([[-0.3, 0.1]]), np.array([[1.0, 0.5]]))
    cloud = np.random.default_rng(3).normal(size=(200, 2))

    def pdf(law: Gaussians, x: np.ndarray) -> float:
        return float(np.prod(stats.norm.pdf(x, law.means[0], law.scales[0])))

    for y in cloud:
        stood = Scripted([True])
        verify(SeriesDraft(y[None], q), p, stood)
        source = verify(SeriesDraft(y[None], q), p, Scripted([False])).value
        refused = Scripted([False])
        back = verify(SeriesDraft(source[None], q), p, refused).value
        assert back == pytest.approx(y, abs=1e-12)
        result = pdf(q, y) * stood.chances[0] + pdf(q, source) * refused.chances[0]
        assert result == pytest.approx(pdf(p, y), abs=1e-12)


# Trajectories sampled with the production streams


@dataclass(frozen=True)
class AR:
    """y_t ~ N(a y_{t-1} + b y_{t-2}, scale^2), from two zeros."""

    a: float
    b: float
    scale: float

    def row(self, past: list[float]) -> tuple[float, float]:
        before = [0.0, 0.0, *past]
        return self.a * before[-1] + self.b * before[-2], self.scale

    def covariance(self, length: int) -> np.ndarray:
        """Covariance of the first ``length`` values, from their weights on the noise."""
        weights = np.zeros((length, length))
        for t in range(length):
            if t:
                weights[t] += self.a * weights[t - 1]
            if t > 1:
                weights[t] += self.b * weights[t - 2]
            weights[t, t] = 1.0
        return self.scale**2 * weights @ weights.T


TARGET = AR(0.7, -0.3, 0.9)
DRAFTS = {"equal scales": AR(0.4, 0.0, 0.9), "draft too broad": AR(0.5, 0.0, 1.2), "too narrow": AR(0.5, 0.0, 0.7)}
LENGTH, DEPTH, DRAWS = 6, 3, 3000


def sample(draft: AR, seed: int, rule: Verify = verify) -> tuple[list[float], set[Origin]]:
    """One series of LENGTH values, in decode steps."""
    streams, past = Streams(seed), list[float]()
    origins: set[Origin] = set()
    while len(past) < LENGTH:
        numbers = SeededReals(streams, Purpose.DRAFT, len(past))
        values: list[float] = []
        q: list[tuple[float, float]] = []
        for i in range(min(DEPTH, LENGTH - len(past) - 1)):
            q.append(draft.row(past + values))
            values.append(float(rows(q[-1]).draw(0, numbers, i)[0]))
        p = [TARGET.row(past + values[:i]) for i in range(len(values) + 1)]
        guessed = SeriesDraft(np.array(values).reshape(-1, 1), rows(*q))
        verdict = rule(guessed, rows(*p), SeededReals(streams, Purpose.VERIFY, len(past)))
        past += [*values[: verdict.accepted], float(verdict.value[0])]
        origins.add(verdict.origin)
    return past, origins


def p_values(series: np.ndarray) -> dict[str, float]:
    """KS against the target's own law: three marginals, the sum, and the values with their dependence taken out."""
    covariance = TARGET.covariance(LENGTH)
    ones = np.ones(LENGTH)
    scales = {f"value {t}": (np.eye(LENGTH)[t]) for t in (0, 2, 5)} | {
        "sum": ones,
        "last step": np.eye(LENGTH)[5] - np.eye(LENGTH)[4],
    }
    result = {
        name: float(stats.kstest(series @ w, "norm", args=(0.0, math.sqrt(w @ covariance @ w))).pvalue)
        for name, w in scales.items()
    }
    noise = np.linalg.solve(np.linalg.cholesky(covariance), series.T)
    result["noise"] = float(stats.kstest(noise.ravel(), "norm").pvalue)
    result["length"] = float(stats.kstest((noise**2).sum(0), "chi2", args=(LENGTH,)).pvalue)
    result["neighbours"] = float(stats.norm.sf(abs(np.sum(noise[1:] * noise[:-1])) / math.sqrt(noise[1:].size)) * 2)
    return result


@pytest.mark.parametrize("name", DRAFTS)
def test_trajectories_follow_the_targets_law(name):
    drawn = [sample(DRAFTS[name], random_seed_from(5, i)) for i in range(DRAWS)]
    result = p_values(np.array([series for series, _ in drawn]))
    assert min(result.values()) > ALPHA, result
    own = Origin.REFLECTED if name == "equal scales" else Origin.RESIDUAL
    assert set().union(*(origins for _, origins in drawn)) == {Origin.BONUS, own}


# Wrong on purpose


def wrong_point(draft: SeriesDraft, target: Gaussians, stream: SeededReals) -> SeriesVerdict:
    """Mirrored about the target's mean instead of the midpoint."""
    verdict = verify(draft, target, stream)
    if verdict.origin is not Origin.REFLECTED:
        return verdict
    i = verdict.accepted
    return SeriesVerdict(i, 2.0 * target.means[i] - draft.values[i], Origin.REFLECTED)


def not_reflected(draft: SeriesDraft, target: Gaussians, stream: SeededReals) -> SeriesVerdict:
    """A refused value gives way to a plain draw from the target."""
    verdict = verify(draft, target, stream)
    if verdict.origin is Origin.BONUS:
        return verdict
    i = verdict.accepted
    return SeriesVerdict(i, target.draw(i, stream, 99), Origin.RESIDUAL)


@pytest.fixture
def upside_down(monkeypatch) -> Verify:
    """Accepts with min(1, q / p)."""

    def chance(p: Gaussians, q: Gaussians, row: int, value: np.ndarray) -> float:
        return math.exp(min(0.0, q.log_density(row, value) - p.log_density(row, value)))

    monkeypatch.setattr(continuous_verifier, "_chance", chance)
    return verify


def test_the_quadrature_finds_a_wrong_mirror_and_an_upside_down_ratio(upside_down, monkeypatch):
    assert one_step_error(STEPS["equal scales"], upside_down) > 1e-2
    assert one_step_error(STEPS["draft too broad"], upside_down) > 1e-2
    assert two_steps_error(upside_down) > 1e-3
    monkeypatch.undo()
    assert one_step_error(STEPS["equal scales"], wrong_point) > 1e-2
    assert two_steps_error(wrong_point) > 1e-3


@pytest.mark.parametrize("rule", [wrong_point, not_reflected])
def test_the_trajectories_find_it_too(rule):
    series = np.array([sample(DRAFTS["equal scales"], random_seed_from(5, i), rule)[0] for i in range(DRAWS)])
    assert min(p_values(series).values()) < ALPHA


def test_the_trajectories_find_an_upside_down_ratio(upside_down):
    series = np.array([sample(DRAFTS["equal scales"], random_seed_from(5, i), upside_down)[0] for i in range(DRAWS)])
    assert min(p_values(series).values()) < ALPHA


# The numbers, and what is refused


def test_numbers_are_normal_and_depend_on_their_address_alone():
    streams = Streams(3)
    drawn = SeededReals(streams, Purpose.DRAFT, 0).normal(20_000, 0)
    assert stats.kstest(drawn, "norm").pvalue > ALPHA
    assert SeededReals(Streams(3), Purpose.DRAFT, 0).normal(1, 0) == SeededReals(streams, Purpose.DRAFT, 0).normal(1, 0)
    addresses = [(purpose, at, i) for purpose in (Purpose.DRAFT, Purpose.VERIFY) for at in range(3) for i in range(3)]
    numbers = {float(SeededReals(streams, purpose, at).normal(1, i)[0]) for purpose, at, i in addresses}
    assert len(numbers) == len(addresses)


def test_identical_distributions_accept_everything_and_no_draft_is_plain_sampling():
    p = rows((0.1, 1.0), (0.2, 2.0), (0.3, 1.0))
    q = Gaussians(p.means[:2], p.scales[:2])
    stream = SeededReals(Streams(1), Purpose.VERIFY, 0)
    assert verify(SeriesDraft(np.array([[3.0], [-2.0]]), q), p, stream).accepted == 2
    nothing = SeriesDraft(np.empty((0, 1)), Gaussians(np.empty((0, 1)), np.empty((0, 1))))
    verdict = verify(nothing, rows((0.5, 2.0)), stream)
    assert verdict.origin is Origin.BONUS and verdict.value == 0.5 + 2.0 * stream.normal(1, 0)


def test_invalid_laws_and_drafts_are_refused():
    with pytest.raises(ValueError, match="scales finite and above 0"):
        rows((0.0, 0.0))
    with pytest.raises(ValueError, match="drawn from a law"):
        SeriesDraft(np.zeros((2, 1)), rows((0.0, 1.0)))
    with pytest.raises(ValueError, match="expected \\(2, 1\\)"):
        verify(SeriesDraft(np.zeros((1, 1)), rows((0.0, 1.0))), rows((0.0, 1.0)), Scripted([]))
    with pytest.raises(ValueError, match="closed form"):
        overlap(rows((0.0, 1.0)), rows((0.0, 2.0)), 0)
