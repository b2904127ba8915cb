"""The examples beyond text: their distribution is the target's, and a seed's image is the same with any draft."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from tests.exactness.gtest import g_test

import digits
import series
from continuous_verifier import Origin
from foretoken.core.context import Exactness
from foretoken.core.draft import Draft, Sampled
from foretoken.core.streams import random_seed_from
from foretoken.propose.base import Proposer

pytestmark = pytest.mark.slow

ALPHA = 1e-3  # of each test of a law; seeds are fixed


# Digits


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return digits.load()[:400]


@pytest.fixture(scope="module")
def target(images):
    return digits.train(images, epochs=2)


@pytest.fixture(scope="module")
def coarse(images):
    return digits.CoarseDraft(images)


class Lying(Proposer):
    """Reports the uniform law for what the coarse draft drew."""

    def __init__(self, inner):
        self.inner = inner

    def propose(self, contexts, budgets):
        drafts = self.inner.propose(contexts, budgets)
        return [
            Draft.chain(d.tokens, Sampled(torch.full_like(d.law.probs, 1 / digits.VOCABULARY))) if len(d) else d
            for d in drafts
        ]


def pixel_law(target, prompt, pixels: int) -> dict[tuple[int, ...], float]:
    """The target's own law of the next ``pixels`` pixels, by enumeration."""
    law = {(): 1.0}
    for _ in range(pixels):
        rows = target.logits([[*prompt, *past] for past in law]).softmax(-1)
        law = {
            (*past, level): p * float(row[level])
            for (past, p), row in zip(law.items(), rows, strict=True)
            for level in range(digits.LEVELS)
        }
    return law


def drawn_pixels(target, proposer, prompt, grade, draws: int) -> Counter[tuple[int, ...]]:
    drawings, _ = digits.sample(target, proposer, [prompt] * draws, 2, seed=11, grade=grade, pixels=2, batch=256)
    return Counter(drawing.pixels[-2:] for drawing in drawings)


@pytest.mark.parametrize("grade", [Exactness.DISTRIBUTION, Exactness.TRAJECTORY])
def test_pixels_follow_the_targets_law(target, coarse, images, grade):
    """Two pixels in the middle of an image, all 289 pairs, against their exact chances."""
    prompt = images[3, :21].tolist()
    result = g_test(drawn_pixels(target, coarse, prompt, grade, 3000), pixel_law(target, prompt, 2))
    assert result.dof > 15, result
    assert result.p_value > ALPHA, result


def test_a_draft_that_lies_about_its_law_is_found(target, coarse, images):
    prompt = images[3, :21].tolist()
    counts = drawn_pixels(target, Lying(coarse), prompt, Exactness.DISTRIBUTION, 3000)
    assert g_test(counts, pixel_law(target, prompt, 2)).p_value < ALPHA


def test_whole_images_are_those_of_plain_sampling(target, coarse):
    """Their ink, its balance and single pixels, in two samples that share no number."""
    prompts = [[digits.LEVELS + i % 10] for i in range(120)]
    plain, _ = digits.sample(target, Proposer(), prompts, 0, seed=1, batch=120)
    fast, steps = digits.sample(target, coarse, prompts, 6, seed=2, batch=120)
    a, b = (np.array([d.pixels for d in drawings]) for drawings in (plain, fast))
    half = np.where(np.arange(64) < 32, 1, -1)
    for statistic in (np.ones(64), half, *np.eye(64)[[18, 28, 45]]):
        assert stats.ks_2samp(a @ statistic, b @ statistic).pvalue > ALPHA
    for at in (10, 35, 52):
        table = np.array([np.bincount(x[:, at] // 4, minlength=5) for x in (a, b)])
        table = table[:, table.sum(0) > 0]
        assert stats.chi2_contingency(table, lambda_="log-likelihood").pvalue > ALPHA
    assert sum(d.steps for d in fast) < 0.5 * sum(d.steps for d in plain)
    assert all(len(step.tokens) <= len(step.draft) + 1 for step in steps)


def test_a_seed_has_one_image_in_the_trajectory_grade(target, coarse):
    prompts = [[digits.LEVELS + i] for i in range(10)]
    grade = Exactness.TRAJECTORY
    plain, _ = digits.sample(target, Proposer(), prompts, 0, 5, grade)
    for depth, batch in ((1, 10), (7, 4)):
        fast, _ = digits.sample(target, coarse, prompts, depth, 5, grade, batch=batch)
        assert [bytes(d.pixels) for d in fast] == [bytes(d.pixels) for d in plain]
        assert sum(d.steps for d in fast) < sum(d.steps for d in plain)


def test_later_pixels_are_never_looked_at(images):
    at = torch.arange(64)
    image = images[:1].expand(64, -1).clone()
    changed = torch.where(torch.arange(65) > at[:, None], 16 - image.clamp(max=16), image)
    assert torch.equal(digits.inputs(image, at), digits.inputs(changed, at))


def test_a_picture_of_digits_is_drawn(target, coarse, images, tmp_path):
    drawings, _ = digits.sample(target, coarse, [[digits.LEVELS + i] for i in range(4)], 6, 1)
    assert all(len(d.accepted) == 64 for d in drawings)
    digits.draw(tmp_path / "digits.png", images[:4, 1:], drawings)
    assert (tmp_path / "digits.png").stat().st_size > 1000


# Series


@pytest.fixture(scope="module")
def pair():
    past = series.make_series(1500, seed=3)
    return past, series.fit_target(past, steps=100), series.fit_draft(past)


@pytest.mark.parametrize("own_scale", [False, True])
def test_futures_follow_the_targets_law(pair, own_scale):
    """Every value, given those before it, is N(target's mean, scale^2); and futures look like those sampled plainly."""
    past, target, draft = pair
    drawn = [series.forecast(past, 8, target, draft, random_seed_from(4, i), 3, own_scale)[0] for i in range(250)]
    pasts = [np.concatenate([past, future[:t]])[-series.WINDOW :] for future in drawn for t in range(8)]
    z = (np.array(drawn).ravel() - target.means(np.array(pasts))) / target.scale
    assert stats.kstest(z, "norm").pvalue > ALPHA
    for t in (0, 1, 2, 7):
        assert stats.kstest(z.reshape(-1, 8)[:, t], "norm").pvalue > ALPHA
    assert stats.kstest(z.reshape(-1, 8).sum(1) / 8**0.5, "norm").pvalue > ALPHA
    plain = [series.forecast(past, 8, target, draft, random_seed_from(9, i), 0)[0] for i in range(250)]
    assert stats.ks_2samp(np.array(plain)[:, -1], np.array(drawn)[:, -1]).pvalue > ALPHA


def test_steps_add_up_and_a_seed_has_one_future(pair):
    past, target, draft = pair
    future, steps = series.forecast(past, 24, target, draft, 1, 5)
    again, _ = series.forecast(past, 24, target, draft, 1, 5)
    assert np.array_equal(future, again)
    assert len(future) == 24 == sum(one.verdict.accepted + 1 for one in steps)
    assert [one.position for one in steps[1:]] == list(
        itertools.accumulate(one.verdict.accepted + 1 for one in steps[:-1])
    )
    assert {one.verdict.origin for one in steps} == {Origin.BONUS, Origin.REFLECTED}


def test_a_picture_of_a_series_is_drawn(pair, tmp_path):
    past, target, draft = pair
    future, steps = series.forecast(past, 24, target, draft, 1, 5)
    series.draw(tmp_path / "series.png", past[-24:], future, steps, np.stack([future, future]))
    assert (tmp_path / "series.png").stat().st_size > 1000
