"""Nodes where no token can come: the law of what was emitted before the error is that of plain decoding.

Enumerated through the whole engine. The end by an error counts as one more symbol, ``ERROR``.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, Sampled
from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.propose.chain import Chain
from foretoken.verify import VERIFIERS, choose

from .enumerate import Branching, Text, outcomes, total_variation
from .enumerate import Law as TextLaw
from .test_engine import PROMPT, PROPOSERS

pytestmark = pytest.mark.slow

LIMIT, ERROR, LENGTH = 1e-12, -1, 3


class Holed(ToyModel):
    """A toy whose logits are NaN after the tokens 1, 2."""

    def logits(self, history):  # type: ignore[no-untyped-def]
        row = super().logits(history)
        return torch.full_like(row, torch.nan) if tuple(history[-2:]) == (1, 2) else row


def forbidding(*before: int) -> SamplingLaw:
    """Nothing can come after the tokens ``before``."""
    return SamplingLaw(bad_words=tuple((*before, token) for token in range(3)))


TARGET = ToyModel(3, order=1, seed=5, sharpness=1.0)
HOLED = Holed(3, order=2, seed=5, sharpness=1.0)
CASES = {
    "after a token": (TARGET, forbidding(2)),
    "after two tokens": (TARGET, replace(forbidding(1, 2), temperature=0.7, frequency_penalty=0.5)),
    "greedy": (TARGET, replace(forbidding(0), temperature=0.0)),
    "logits that are not finite": (HOLED, SamplingLaw(top_p=0.95)),
    "the draft's logits are not finite": (TARGET, SamplingLaw()),
}


def reference(target: ToyModel, law: SamplingLaw) -> TextLaw:
    """The law of plain decoding, from the definition."""
    texts: TextLaw = {(): 1.0}
    for _ in range(LENGTH):
        longer: TextLaw = {}
        for text, p in texts.items():
            tokens = [*PROMPT, *text]
            row = law.probs(target.logits(tokens)[None], [History(tokens, len(PROMPT))])[0]
            ended = text and text[-1] == ERROR
            nexts = [] if ended else [(ERROR, 1.0)] if row.isnan().any() else list(enumerate(row.tolist()))
            longer.update({(*text, token): p * q for token, q in nexts if q > 0.0} if not ended else {text: p})
        texts = longer
    return texts


def emitted(engine: Engine, context: Context, length: int = LENGTH) -> Text:
    engine.add(context, Length(length))
    while engine.busy:
        engine.step()
    error = engine.take(context.id).error
    assert error is None or isinstance(error, InvalidRequest)
    return (*context.tokens[context.prompt_length :], *([ERROR] if error else []))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_law_of_what_comes_before_the_error(case, proposer):
    target, law = CASES[case]
    drafter = HOLED if case.startswith("the draft") else target

    def run(streams: Branching) -> Text:
        speculation, rejection = PROPOSERS[proposer](drafter)
        engine = Engine(target, speculation, Fixed(2), rule=partial(choose, rejection=rejection))
        return emitted(engine, Context(0, list(PROMPT), len(PROMPT), law, streams))  # type: ignore[arg-type]

    assert total_variation(outcomes(run), reference(target, law)) < LIMIT


class Dropping(Chain):
    """A mistake: all of a draft is dropped if it reaches a node at which no token is possible."""

    __slots__ = ()

    def draft(self) -> Draft:
        drafted = super().draft()
        return Draft.empty() if self.stopped else drafted


@pytest.mark.parametrize("rejection", ["block", "token"])
def test_dropping_the_draft_is_caught(rejection, monkeypatch):
    target, law = CASES["after a token"]
    monkeypatch.setattr("foretoken.propose.growers.Chain", Dropping)

    def run(streams: Branching) -> Text:
        speculation, _ = PROPOSERS["draft, block"](target)
        engine = Engine(target, speculation, Fixed(2), rule=partial(choose, rejection=rejection))
        return emitted(engine, Context(0, list(PROMPT), len(PROMPT), law, streams))  # type: ignore[arg-type]

    assert total_variation(outcomes(run), reference(target, law)) > 0.01


@pytest.mark.parametrize("case", CASES)
def test_one_text_per_seed_up_to_the_error(case):
    target, law = CASES[case]

    def texts(speculation: Proposer, depth: int, batch: int) -> list[Text]:
        engine = Engine(target, speculation, Fixed(depth), max_sequences=batch)
        contexts = [Context(i, [*PROMPT, i % 3], 6, law, Streams(i), Exactness.TRAJECTORY) for i in range(8)]
        for context in contexts:
            engine.add(context, Length(12))
        while engine.busy:
            engine.step()
            engine.check_integrity()
        failed = {context.id for context in contexts if engine.take(context.id).error is not None}
        return [(*c.tokens[6:], *([ERROR] if c.id in failed else [])) for c in contexts]

    plain = texts(Proposer(), 0, 1)
    assert any(text[-1] == ERROR for text in plain) or case.startswith("the draft")
    for name, make in PROPOSERS.items():
        for depth, batch in ((1, 1), (4, 4), (9, 8)):
            assert texts(make(target)[0], depth, batch) == plain, (name, depth, batch)


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_rejected_node_without_a_token_does_not_matter(name):
    """Its row is NaN, and the verdict stops above it."""
    p = torch.tensor([[1.0, 0.0], [torch.nan, torch.nan]])
    draft = Draft.chain([1], Sampled(torch.tensor([[0.5, 0.5]])))
    verdict = VERIFIERS[name](draft, p, Streams(0).private(1, 0))  # type: ignore[arg-type]
    assert (verdict.path, verdict.token) == ((), 0)
