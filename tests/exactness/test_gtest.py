"""End to end with real random numbers: every proposer and grade against the target's law over all texts.

The test's power is stated and held: with the draws made here, any law at total variation ``DELTA`` or more from
the target's is found with probability 0.9 at alpha 1e-3.
"""

from collections import Counter
from functools import partial

import pytest

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.streams import Streams, random_seed_from
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.verify import choose

from .enumerate import Text
from .gtest import GResult, draws_for, g_test
from .test_engine import LAWS, PROMPT, PROPOSERS, reference

VOCAB, LENGTH, DELTA = 3, 4, 0.1
TARGET = ToyModel(VOCAB, order=2, seed=9, sharpness=1.0)


def sample(proposer: str, grade: Exactness, law: str, draws: int, seed: int) -> GResult:
    """``draws`` requests, served together in batches, each with its own seed."""
    speculation, rejection = PROPOSERS[proposer](TARGET)
    engine = Engine(TARGET, speculation, Fixed(3), rule=partial(choose, rejection=rejection), max_sequences=64)
    contexts = [
        Context(i, list(PROMPT), len(PROMPT), LAWS[law], Streams(random_seed_from(seed, i)), grade, depth=i % 4)
        for i in range(draws)
    ]
    for context in contexts:
        engine.add(context, Length(LENGTH))
    while engine.busy:
        engine.step()
    counts: Counter[Text] = Counter(tuple(context.tokens[len(PROMPT) :]) for context in contexts)
    return g_test(counts, reference(TARGET, LAWS[law], LENGTH, None))


def holds(proposer: str, grade: Exactness, law: str) -> None:
    draws = draws_for(reference(TARGET, LAWS[law], LENGTH, None), DELTA)
    result = sample(proposer, grade, law, draws, seed=17)
    assert result.p_value > 1e-3, result
    assert result.delta <= DELTA, result


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.slow
def test_texts_follow_the_targets_law(proposer):
    holds(proposer, Exactness.DISTRIBUTION, "plain")


@pytest.mark.parametrize("proposer", [name for name in PROPOSERS if not name.startswith("drawn tree")])
@pytest.mark.slow
def test_texts_of_the_trajectory_grade_follow_it_too(proposer):
    """In this grade a sampled tree ranks its candidates: one proposer stands for all."""
    holds(proposer, Exactness.TRAJECTORY, "plain")


@pytest.mark.parametrize("grade", [Exactness.DISTRIBUTION, Exactness.TRAJECTORY])
@pytest.mark.slow
def test_texts_follow_it_with_filters_and_penalties(grade):
    holds("draft, block", grade, "filters and penalties")


@pytest.mark.slow
def test_the_lossy_grade_is_told_apart():
    """The control: the same test with as many draws finds typical acceptance."""
    draws = draws_for(reference(TARGET, LAWS["plain"], LENGTH, None), DELTA)
    assert sample("draft by argmax", Exactness.TYPICAL, "plain", draws, seed=17).p_value < 1e-3
