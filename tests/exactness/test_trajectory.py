"""The trajectory grade: one text per seed, whatever was proposed, with the target's law."""

from collections import Counter

import pytest
import torch

from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, Sampled
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams

from .decode_step import PROMPT, Pair, Propose, argmax, drawn, drawn_tree, fixed_tree, row_of, table, top_plus_tree
from .gtest import draws_needed, g_test

P, Q = table(4, seed=21), table(4, seed=22)
GRADE = Exactness.TRAJECTORY


def shared(model) -> Propose:
    """A chain sampled with the noise that the target will use."""

    def propose(context: Context, budget: int) -> Draft:
        stream = context.streams.shared(context.generated)
        tokens: list[int] = []
        for index in range(budget):
            tokens.append(stream.categorical(row_of(model, context.law, context, tokens), index=index))
        return Draft.chain(tokens)

    return propose


def shared_top(model, width: int) -> Propose:
    """The ``width`` likeliest winners of the draft's race as siblings."""

    def propose(context: Context, budget: int) -> Draft:
        race = context.streams.shared(context.generated).race(row_of(model, context.law, context), index=0)
        return Draft.tree(race.topk(width).indices.tolist(), (-1,) * width)

    return propose


PROPOSERS = {
    "shared noise": shared(Q),
    "shared noise, siblings": shared_top(Q, 3),
    "private noise": drawn(Q),
    "argmax": argmax(Q),
    "fixed tree": fixed_tree((0, 1, 2, 3, 0, 1), (-1, -1, 0, 0, 1, 3)),
    "drawn tree": drawn_tree(Q, (2, 2), replace=False),
    "top plus one": top_plus_tree(Q, (2, 2)),
}
LAWS = {"plain": SamplingLaw(), "penalties": SamplingLaw(temperature=0.8, frequency_penalty=0.9, top_p=0.9)}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_text_is_that_of_plain_decoding(law, proposer):
    plain = Pair(P, drawn(Q), law=LAWS[law], exactness=GRADE, budget=lambda g: 0)
    for depth in (1, 2, 4):
        pair = Pair(P, PROPOSERS[proposer], law=LAWS[law], exactness=GRADE, budget=lambda g: depth)  # noqa: B023
        for seed in range(8):
            assert pair.text(seed, 10) == plain.text(seed, 10)


@pytest.mark.parametrize("proposer", ["private noise", "argmax", "fixed tree"])
@pytest.mark.slow
def test_law_is_exact(proposer):
    """Enumerated; drafts from the shared noise need no enumeration, since the text does not depend on them."""
    assert Pair(P, PROPOSERS[proposer], exactness=GRADE, budget=lambda g: 2).gap(length=3) < 1e-12


def test_law_over_seeds():
    pair = Pair(P, shared(Q), exactness=GRADE)
    reference = pair.reference(2)
    n = draws_needed(0.12, cells=len(reference))
    result = g_test(Counter(pair.text(1000 + seed, 2) for seed in range(n)), reference)
    assert result.p_value > 1e-3, result


def test_equal_distributions_with_equal_noise_always_match():
    pair = Pair(P, shared(P), exactness=GRADE, budget=lambda g: 5)
    for seed in range(20):
        assert len(pair.emit((), Streams(seed))) == 6


def test_shared_noise_matches_as_often_as_the_theory_says():
    """P(match) = sum_x 1 / sum_y max(p_y/p_x, q_y/q_x), 2408.07978."""
    p, q = P(PROMPT).softmax(-1), Q(PROMPT).softmax(-1)
    expected = float((1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(-1)).sum())
    pair = Pair(P, shared(Q), exactness=GRADE, budget=lambda g: 1)
    n = 3000
    matched = sum(len(pair.emit((), Streams(seed))) == 2 for seed in range(n))
    assert abs(matched / n - expected) < 4 * (expected * (1 - expected) / n) ** 0.5
    tv = 0.5 * float((p - q).abs().sum())
    assert (1 - tv) / (1 + tv) <= expected <= 1 - tv


def test_law_of_the_draft_is_not_read():
    context = Context(0, list(PROMPT), len(PROMPT), SamplingLaw(), Streams(3), GRADE)
    tokens = shared(Q)(context, 3).ids
    wrong = Sampled(torch.zeros(3, 4))
    pair = Pair(P, lambda context, budget: Draft.chain(tokens, wrong), exactness=GRADE)
    assert pair.emit((), Streams(3)) == Pair(P, shared(Q), exactness=GRADE).emit((), Streams(3))
