"""Estimates of tokens per pass against the real engine on toys; a recorded target repeats its output alone."""

import numpy as np
import pytest
import torch

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.models.loading import load_model
from foretoken.models.toy import ToyModel
from foretoken.plan.replay import (
    NotReplayable,
    RecordedModel,
    Recording,
    TextProbabilities,
    chain_estimate,
    record,
    replay_estimate,
    step_estimate,
    survival,
    text_probabilities,
    token_distributions,
    write,
)
from foretoken.plan.statistics import ratio_interval
from foretoken.plan.texts import SampledText, teacher_forced
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.suffix import Lookup, Suffix

TARGET = ToyModel(vocab_size=6, order=2, seed=3, sharpness=1.5)
DRAFT = TARGET.perturbed(0.4)
LIMIT = 24
PROMPTS = [[i % 6, (i * 5 + 1) % 6, (i * i) % 6] for i in range(12)]
GREEDY, WARM = SamplingLaw(temperature=0.0), SamplingLaw()
PENALIZED = SamplingLaw(temperature=0.8, top_k=4, frequency_penalty=0.3, repetition_penalty=1.2)


def both(text, law):
    return text_probabilities(
        text, token_distributions(TARGET, text, law, 6), token_distributions(DRAFT, text, law, 6), law.greedy
    )


def error(numerators, denominators):
    """The standard error of their ratio, clustered by request."""
    _, low, high = ratio_interval(numerators, denominators, 0.95)
    return (high - low) / 3.92


def at_position(counts, position):
    return counts[position] if position < len(counts) else 0.0


def at(estimate, position):
    """By request: steps that accepted and that drafted so deep."""
    return (
        [at_position(tally.positions.accepted, position) for tally in estimate.tallies],
        [at_position(tally.positions.drafted, position) for tally in estimate.tallies],
    )


def tallies(estimate):
    return [(tally.tokens, tally.steps, tally.sizes, tally.positions) for tally in estimate.tallies]


@pytest.mark.parametrize(
    "proposer", [Lookup, Suffix, lambda: DraftModel(DRAFT), lambda: DraftModel(DRAFT, DraftModelConfig(tree="top_k"))]
)
@pytest.mark.parametrize("depth", [1, 4, 7])
@pytest.mark.slow
def test_a_greedy_replay_is_the_run(proposer, depth):
    texts = write(TARGET, PROMPTS, GREEDY, LIMIT)
    replay = replay_estimate(TARGET, record(TARGET, texts), proposer(), GREEDY, depth, batch=1)
    real = step_estimate(TARGET, PROMPTS, proposer(), GREEDY, depth, LIMIT, batch=1)
    assert tallies(replay) == tallies(real)
    assert replay.estimator == "text" and real.estimator == "steps"


def test_drawn_drafts_are_refused_by_the_record():
    texts = write(TARGET, PROMPTS[:2], WARM, LIMIT)
    with pytest.raises(NotReplayable):
        replay_estimate(TARGET, record(TARGET, texts), DraftModel(DRAFT), WARM, 3)


def test_chains_at_temperature_0_are_counted_exactly():
    texts = write(TARGET, PROMPTS, GREEDY, LIMIT, eos=(5,))
    result = [both(text, GREEDY) for text in texts]
    for depth in (1, 3, 6):
        real = step_estimate(TARGET, PROMPTS, DraftModel(DRAFT), GREEDY, depth, LIMIT, eos=(5,), batch=1)
        told_ = chain_estimate(result, depth)
        assert told_.tokens == pytest.approx(real.tokens)
        assert told_.steps == pytest.approx(real.steps)
        assert sum(told_.sizes.values()) == pytest.approx(1)


@pytest.mark.parametrize("law", [WARM, PENALIZED], ids=["plain", "penalized"])
@pytest.mark.parametrize("rejection", ["token", "block"])
@pytest.mark.slow
def test_the_distribution_of_steps_is_the_engines(law, rejection):
    """The same ratio from texts written plainly and from real steps, within their joint error."""
    prompts = [PROMPTS[i % 12] for i in range(140)]
    texts = write(TARGET, prompts, law, LIMIT, eos=(5,), seed=1)
    result = [both(text, law) for text in texts]
    for depth in (1, 4) if law is WARM else (4,):
        estimate = chain_estimate(result, depth, rejection)
        real = step_estimate(TARGET, prompts, DraftModel(DRAFT), law, depth, LIMIT, (5,), rejection, seed=2)
        assert estimate.tokens_per_pass == pytest.approx(sum(estimate.tokens) / sum(estimate.steps))
        ours, theirs = error(estimate.tokens, estimate.steps), error(real.tokens, real.steps)
        assert ours < theirs
        assert abs(estimate.tokens_per_pass - real.tokens_per_pass) < 3.5 * np.hypot(ours, theirs)
        for position, rates in enumerate(zip(estimate.acceptance, real.acceptance, strict=True)):
            allowed = np.hypot(*(error(*at(each, position)) for each in (estimate, real)))
            assert abs(rates[0] - rates[1]) < 4 * allowed


@pytest.mark.parametrize("rejection", ["token", "block"])
def test_survival_on_a_text_by_enumeration(rejection):
    """Sum over drafts of q(draft) P(accept k | draft), restricted to those that spell the text, over p(text)."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    for tokens in [(a, b) for a in (0, 1) for b in (0, 1)]:
        text = SampledText((0,), tokens, 5)
        reach = survival(TextProbabilities(text, p[list(tokens)], q[list(tokens)], fixed=False), 2, rejection)
        w, by_hand = 1.0, [1.0]
        mass_q = mass_p = 1.0
        for x in tokens:
            w = min(1.0, w * p[x] / q[x]) if rejection == "block" else w * min(1.0, p[x] / q[x])
            mass_q, mass_p = mass_q * q[x], mass_p * p[x]
            by_hand.append(mass_q * w / mass_p)
        assert reach[:, 0] == pytest.approx(by_hand)


WARM = SamplingLaw()


def test_rows_and_states_are_the_texts():
    text = write(TARGET, [[1, 2, 3], [2, 2, 1, 0]], WARM, 70)[1]
    model = RecordedModel(TARGET, record(TARGET, [text], (0, 1)))
    handle, real = model.open(text.prompt), TARGET.open(text.prompt)
    wrong = (text.tokens[0] + 1) % 6
    tree = Draft.tree([text.tokens[0], wrong, text.tokens[1]], (-1, -1, 0))
    for emitted in (text.tokens[:2], text.tokens[2:65]):
        (seen,), (true,) = model.score([handle], [tree], (1,)), TARGET.score([real], [tree], (1,))
        assert seen.first == true.first and seen.logits.shape == true.logits.shape
        assert int(seen.logits[0].argmax()) == text.whole[len(handle.tokens)]
        on_text = [row for row in range(len(seen.taps[1])) if seen.taps[1][row].any()]
        assert torch.equal(seen.taps[1][on_text], true.taps[1][on_text])
        assert len(on_text) >= len(seen.taps[1]) - 1
        model.commit([handle], [emitted])
        TARGET.commit([real], [emitted])
        assert handle.cached == real.cached and handle.tokens == real.tokens
        tree = Draft.chain(list(text.tokens[2:5]))
    TARGET.close(real)


def test_a_law_makes_its_rows_one_hot_whatever_it_asks():
    law = SamplingLaw(temperature=0.01, top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.3, presence_penalty=2.0)
    (text,) = write(TARGET, [[1, 2, 3]], law, 12)
    model = RecordedModel(TARGET, [Recording(text)])
    (scores,) = model.score([model.open(text.prompt)], [Draft.chain(list(text.tokens[:5]))])
    context = Context(0, list(text.prompt), 3, law, Streams(0))
    probs = law.probs(scores.logits, context.histories(Draft.chain(list(text.tokens[:5]))))
    assert torch.equal(probs, torch.nn.functional.one_hot(torch.tensor(text.tokens[:6]), 6).float())


def test_texts_of_one_prompt_take_turns_and_others_are_refused():
    texts = [SampledText((1,), (2, 3), 4), SampledText((1,), (4, 5), 4)]
    model = RecordedModel(TARGET, record(TARGET, texts))
    firsts = [int(model.score([model.open([1])], [Draft.empty()])[0].logits.argmax()) for _ in range(3)]
    assert firsts == [2, 4, 2]
    with pytest.raises(InvalidRequest, match="not recorded"):
        model.open([2])


def test_teacher_forcing_says_what_decoding_said():
    (text,) = write(TARGET, [[1, 2, 3]], WARM, 150)
    pieces = list(teacher_forced(TARGET, text, (1,)))
    assert [len(piece.logits) for piece in pieces] == [64, 64, 22]
    logits = torch.cat([piece.logits for piece in pieces])
    assert all(torch.equal(logits[i], TARGET.logits(text.whole[: 3 + i])) for i in range(150))
    taps = torch.cat([piece.taps[1] for piece in pieces])
    assert all(torch.equal(taps[i], TARGET.hidden(text.whole[: i + 1], 1)) for i in range(152))


def test_states_of_a_prompt_are_read_where_its_rows_are_known(tiny_pair):
    """A target that keeps prompts would skip the rows that it has."""
    prompt = [7 + i % 50 for i in range(150)]
    first, kept = load_model(tiny_pair.target), load_model(tiny_pair.target)
    if not kept.enable_prefix_cache(1 << 30):
        pytest.skip("no compiled kernels here")
    (text,) = write(kept, [prompt], WARM, 20)
    again = kept.open(text.prompt)
    assert again.cached > 0
    kept.close(again)
    (own,), (other,) = record(first, [text], (0, 2)), record(kept, [text], (0, 2))
    assert all(len(own.taps[layer]) == len(text.whole) - 1 for layer in (0, 2))
    assert all(torch.equal(own.taps[layer], other.taps[layer]) for layer in (0, 2))
    pairs = zip(teacher_forced(first, text), teacher_forced(kept, text), strict=True)
    assert all(torch.equal(one.logits, two.logits) for one, two in pairs)
