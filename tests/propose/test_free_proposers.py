"""The same text whatever is proposed out of text: suffix, lookup, retrieval and prediction through the whole loop."""

from collections.abc import Callable

import numpy as np
import pytest

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.propose.prediction import Prediction
from foretoken.propose.retrieval import Datastore, Retrieval
from foretoken.propose.suffix import Lookup, Suffix, SuffixConfig
from foretoken.propose.suffix_array import SuffixArray

VOCAB, LENGTH = 6, 60
TARGET = ToyModel(VOCAB, order=2, seed=3, sharpness=3.0)


def run(proposer: Proposer, batch: int, grade: Exactness, temperature: float, depth: int = 8) -> list[list[int]]:
    engine = Engine(TARGET, proposer, Fixed(depth), max_sequences=batch)
    contexts = [
        Context(
            i,
            [1, 2, i % VOCAB],
            3,
            SamplingLaw(temperature),
            Streams(50 + i // 2),
            grade,
            prediction=tuple((i * j) % VOCAB for j in range(50)),
        )
        for i in range(10)
    ]
    for context in contexts:
        engine.add(context, Length(LENGTH))
    while engine.busy:
        engine.step()
    return [c.tokens[3:] for c in contexts]


def datastore() -> Datastore:
    text = [token for row in run(Proposer(), 8, Exactness.TRAJECTORY, 1.0) for token in row]
    return Datastore([SuffixArray.build(np.array(text, np.int32), 32)], len(text))


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "lookup": Lookup,
    "suffix": Suffix,
    "suffix, a chain, a tiny store": lambda: Suffix(SuffixConfig(top_k=1, suffix_decoding_max_cached_tokens=150)),
    "retrieval": lambda: Retrieval(datastore()),
    "prediction": Prediction,
}


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("grade, temperature", [(Exactness.TRAJECTORY, 1.0), (Exactness.DISTRIBUTION, 0.0)])
@pytest.mark.slow
def test_the_text_does_not_depend_on_the_proposer_or_the_batch(name, grade, temperature):
    plain = run(Proposer(), 1, grade, temperature)
    for batch, depth in ((1, 8), (8, 8), (8, 1), (8, 40)):
        assert run(PROPOSERS[name](), batch, grade, temperature, depth) == plain


@pytest.mark.parametrize("name", ["lookup", "suffix", "retrieval"])
def test_every_proposer_has_accepted_tokens(name):
    engine = Engine(TARGET, PROPOSERS[name](), Fixed(8))
    context = Context(0, [1, 2, 3], 3, SamplingLaw(0.0), Streams(0))
    engine.add(context, Length(LENGTH))
    num_steps = 0
    while engine.busy:
        num_steps += len(engine.step())
    assert num_steps < LENGTH // 2


def test_stored_outputs_serve_the_next_request():
    engine = Engine(TARGET, Suffix(), Fixed(24))
    num_steps = []
    for identifier in range(2):
        engine.add(
            Context(identifier, [1, 2, 3], 3, SamplingLaw(1.0), Streams(7), Exactness.TRAJECTORY), Length(LENGTH)
        )
        count = 0
        while engine.busy:
            count += len(engine.step())
        num_steps.append(count)
    assert num_steps[1] < num_steps[0] / 2
