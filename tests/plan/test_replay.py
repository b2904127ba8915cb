"""Estimates of tokens per pass against the real engine on toy models."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.core.sampling import SamplingLaw
from foretoken.models.toy import ToyModel
from foretoken.plan.chains import Ratios, accepted, expected, ratios, rows
from foretoken.plan.replay import NotReplayable, record, replayed, run
from foretoken.plan.statistics import ratio_interval
from foretoken.plan.texts import SampledText, write
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.lookup import Lookup
from foretoken.propose.suffix import Suffix

TARGET = ToyModel(vocab_size=6, order=2, seed=3, sharpness=1.5)
DRAFT = TARGET.perturbed(0.4)
LIMIT = 24
PROMPTS = [[i % 6, (i * 5 + 1) % 6, (i * i) % 6] for i in range(12)]
GREEDY, WARM = SamplingLaw(temperature=0.0), SamplingLaw()
PENALISED = SamplingLaw(temperature=0.8, top_k=4, frequency_penalty=0.3, repetition_penalty=1.2)


def both(text, law):
    return ratios(text, rows(TARGET, text, law, 6), rows(DRAFT, text, law, 6), law.greedy)


def error(numerators, denominators):
    """The standard error of their ratio, clustered by request."""
    _, low, high = ratio_interval(numerators, denominators, 0.95)
    return (high - low) / 3.92


def at(estimate, position):
    """By request: rounds that accepted and that drafted so deep."""
    return (
        [tally.accepted_at.get(position, 0.0) for tally in estimate.tallies],
        [tally.drafted_at.get(position, 0.0) for tally in estimate.tallies],
    )


def tallies(estimate):
    return [(tally.tokens, tally.rounds, tally.sizes, tally.accepted_at) for tally in estimate.tallies]


@pytest.mark.parametrize("proposer", [Lookup, Suffix, lambda: DraftModel(DRAFT),
                                      lambda: DraftModel(DRAFT, DraftModelConfig(tree="top_k"))])  # fmt: skip
@pytest.mark.parametrize("depth", [1, 4, 7])
def test_a_greedy_replay_is_the_run(proposer, depth):
    texts = write(TARGET, PROMPTS, GREEDY, LIMIT)
    replay = replayed(TARGET, record(TARGET, texts), proposer(), GREEDY, depth, together=1)
    real = run(TARGET, PROMPTS, proposer(), GREEDY, depth, LIMIT, together=1)
    assert tallies(replay) == tallies(real)
    assert replay.estimator == "text" and real.estimator == "rounds"


def test_drawn_drafts_are_refused_by_the_record():
    texts = write(TARGET, PROMPTS[:2], WARM, LIMIT)
    with pytest.raises(NotReplayable):
        replayed(TARGET, record(TARGET, texts), DraftModel(DRAFT), WARM, 3)


def test_chains_at_temperature_0_are_counted_exactly():
    texts = write(TARGET, PROMPTS, GREEDY, LIMIT, eos=(5,))
    found = [both(text, GREEDY) for text in texts]
    for depth in (1, 3, 6):
        real = run(TARGET, PROMPTS, DraftModel(DRAFT), GREEDY, depth, LIMIT, eos=(5,), together=1)
        told_ = expected(found, depth)
        assert told_.tokens == pytest.approx(real.tokens)
        assert told_.rounds == pytest.approx(real.rounds)
        assert sum(told_.sizes.values()) == pytest.approx(1)


@pytest.mark.parametrize("law", [WARM, PENALISED], ids=["plain", "penalised"])
@pytest.mark.parametrize("rejection", ["token", "block"])
def test_the_law_of_rounds_is_the_engines(law, rejection):
    """The same ratio from texts written plainly and from real rounds, within their joint error."""
    prompts = [PROMPTS[i % 12] for i in range(140)]
    texts = write(TARGET, prompts, law, LIMIT, eos=(5,), seed=1)
    found = [both(text, law) for text in texts]
    for depth in (1, 4) if law is WARM else (4,):
        estimate = expected(found, depth, rejection)
        real = run(TARGET, prompts, DraftModel(DRAFT), law, depth, LIMIT, (5,), rejection, seed=2)
        assert estimate.tokens_per_pass == pytest.approx(sum(estimate.tokens) / sum(estimate.rounds))
        mine, theirs = error(estimate.tokens, estimate.rounds), error(real.tokens, real.rounds)
        assert mine < theirs
        assert abs(estimate.tokens_per_pass - real.tokens_per_pass) < 3.5 * np.hypot(mine, theirs)
        for position, rates in enumerate(zip(estimate.acceptance, real.acceptance, strict=True)):
            allowed = np.hypot(*(error(*at(each, position)) for each in (estimate, real)))
            assert abs(rates[0] - rates[1]) < 4 * allowed


@pytest.mark.parametrize("rejection", ["token", "block"])
def test_survival_on_a_text_by_enumeration(rejection):
    """Sum over drafts of q(draft) P(accept k | draft), restricted to those that spell the text, over p(text)."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    for tokens in [(a, b) for a in (0, 1) for b in (0, 1)]:
        text = SampledText((0,), tokens, 5)
        survival = accepted(Ratios(text, p[list(tokens)], q[list(tokens)], fixed=False), 2, rejection)
        w, by_hand = 1.0, [1.0]
        mass_q = mass_p = 1.0
        for x in tokens:
            w = min(1.0, w * p[x] / q[x]) if rejection == "block" else w * min(1.0, p[x] / q[x])
            mass_q, mass_p = mass_q * q[x], mass_p * p[x]
            by_hand.append(mass_q * w / mass_p)
        assert survival[:, 0] == pytest.approx(by_hand)
    printed = {"token": 10 / 9, "block": 11 / 9}  # accepted tokens of the toy of 2403.10444
    total = sum(
        p[a]
        * p[b]
        * accepted(Ratios(SampledText((0,), (a, b), 5), p[[a, b]], q[[a, b]], False), 2, rejection)[1:, 0].sum()
        for a in (0, 1) for b in (0, 1)
    )  # fmt: skip
    assert total == pytest.approx(printed[rejection])
