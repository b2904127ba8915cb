"""Tokens that a model has no embedding for: a draft model skips their sequence, a target refuses them by name."""

from pathlib import Path

import pytest
import torch
from tests.models.tiny import GROUPED, Tiny, only_runner

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Model, Scores
from foretoken.models.loading import load_model
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Observation, Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.growers import TreeKind

SMALL, LARGE = 37, 101
KNOWN = [3, 9, 21, 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**GROUPED, "vocab_size": SMALL, "tie_word_embeddings": True}
    return Tiny("Llama", config).save(tmp_path_factory.mktemp("small"))


@pytest.fixture(params=["compiled", "torch", "hf"])
def model(request: pytest.FixtureRequest, folder: Path) -> Model:
    """A model of ``SMALL`` tokens on each runner."""
    name: str = request.param
    with only_runner(name):
        return load_model(folder, "float32", "cpu", "hf" if name == "hf" else "native")


def context(identifier: int, tokens: list[int], temperature: float = 0.0) -> Context:
    return Context(identifier, list(tokens), len(tokens), SamplingLaw(temperature=temperature), Streams(identifier))


def drafter(model: Model, shape: TreeKind = "chain") -> DraftModel:
    return DraftModel(model, DraftModelConfig(tree=shape), LARGE)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", ["chain", "ranked"])
@pytest.mark.parametrize("unknown", [SMALL, LARGE - 1, 2**40])
@pytest.mark.slow
def test_a_draft_model_skips_a_sequence_that_it_cannot_read(unknown, shape, temperature, model):
    alone = drafter(model, shape).propose([context(0, KNOWN, temperature)], [4])[0]
    contexts = [context(1, [5, unknown, 6], temperature), context(0, KNOWN, temperature), context(2, [unknown])]
    proposer = drafter(model, shape)
    for _ in range(2):
        first, healthy, last = proposer.propose(contexts, [4] * 3)
        assert not len(first) and not len(last)
        assert len(healthy) == 4
        if model.batch_invariant:
            assert (healthy.ids, healthy.parents) == (alone.ids, alone.parents)
            assert temperature == 0.0 or torch.equal(healthy.law.probs, alone.law.probs)  # type: ignore[union-attr]


def test_a_token_that_arrives_later_ends_the_drafts_of_its_sequence_alone(model: Model) -> None:
    contexts, proposer = [context(0, KNOWN), context(1, [7, 8])], drafter(model)
    drafts = proposer.propose(contexts, [3, 3])
    observations = []
    for one, draft, token in zip(contexts, drafts, (4, SMALL), strict=True):
        one.tokens += [draft.ids[0], token]
        tokens = draft.ids[0], token
        step = StepOutput(one.id, 0, draft, Verdict((0,), token), tokens, Timings(0, 0, 0, 0, 1))
        observations.append(Observation(step, Scores(torch.zeros(1, LARGE))))
    proposer.observe(contexts, observations)
    healthy, other = proposer.propose(contexts, [3, 3])
    assert len(healthy) == 3 and not len(other)
    assert not model.batch_invariant or healthy.ids == drafter(model).propose([contexts[0]], [3])[0].ids
    contexts[1].tokens.append(5)
    assert not len(proposer.propose(contexts, [3, 3])[1])
    for one in contexts:
        proposer.forget(one)
    model.check()


def test_a_target_names_the_token_and_its_vocabulary(model: Model) -> None:
    message = f"token {SMALL} is outside the model's vocabulary of {SMALL} tokens; ids from 0 to {SMALL - 1}"
    with pytest.raises(InvalidRequest, match=message):
        model.admit([*KNOWN, SMALL], ())
    with pytest.raises(InvalidRequest, match=message):
        model.open([SMALL])
    handle = model.open(KNOWN)
    expected = model.score([handle], [Draft.empty()])[0].logits
    model.commit([handle], [[]])
    for unknown in (SMALL, -1):
        with pytest.raises(InvalidRequest, match=f"token {unknown} is outside"):
            model.score([handle], [Draft.chain([4, unknown])])
        with pytest.raises(InvalidRequest, match=f"token {unknown} is outside"):
            model.commit([handle], [[unknown]])
    assert handle.tokens == KNOWN
    torch.testing.assert_close(model.score([handle], [Draft.empty()])[0].logits, expected)


def test_the_engine_refuses_a_request_by_itself() -> None:
    engine = Engine(ToyModel(vocab_size=7), Proposer(), Fixed(0))
    engine.add(context(0, [1, 2]), Length(3))
    with pytest.raises(InvalidRequest, match="token 7 is outside the model's vocabulary of 7 tokens"):
        engine.add(context(1, [1, 7]), Length(3))
    assert not engine.waiting[1:]


@pytest.mark.parametrize("wrong", [7, -1, 2**40])
def test_a_draft_with_an_unknown_token_is_dropped_and_changes_no_text(wrong, caplog):
    class Wrong(Proposer):
        name = f"wrong{wrong}"

        def propose(self, contexts, budgets):  # type: ignore[no-untyped-def]
            return [Draft.chain([1, wrong] if one.id else [1]) for one in contexts]

    def texts(proposer: Proposer, tokens: int) -> list[list[int]]:
        engine = Engine(ToyModel(vocab_size=7), proposer, Fixed(tokens))
        for i in range(2):
            engine.add(context(i, [1, 2 + i], 1.0), Length(8))
        while engine.busy:
            engine.step()
        return [engine.take(i).context.tokens for i in range(2)]

    drafted = texts(Wrong(), 2)
    assert drafted[1] == texts(Proposer(), 0)[1]
    assert "drafted a token outside the target's vocabulary of 7 tokens" in caplog.text
