"""Recorded log-probabilities are the target's at each token's position, and of its request alone."""

from collections.abc import Sequence
from math import log
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.sequence import OutputOptions, TokenLogprobs
from foretoken.engine.sequence import Sequence as Running
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig

TARGET = ToyModel(vocab_size=7, order=2, seed=3, sharpness=2.0)


class Decoys(Proposer):
    """The target's next two greedy tokens, behind a wrong one that the first of them follows, too."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(c.tokens) if b >= 4 else Draft.empty() for c, b in zip(contexts, budgets, strict=True)]

    def _draft(self, tokens: list[int]) -> Draft:
        first = int(TARGET.logits(tokens).argmax())
        second = int(TARGET.logits([*tokens, first]).argmax())
        wrong = (first + 1) % TARGET.vocab_size
        return Draft.tree([wrong, first, first, second], (-1, 0, -1, 2))


def finished(proposer: Proposer, prompt: list[int], temperature: float, **options: int) -> tuple[Running, list[int]]:
    """A sequence of 30 tokens with what was recorded of it, and the numbers of tokens accepted in its steps."""
    engine = Engine(TARGET, proposer, Fixed(4), prompt_rows=50)
    context = Context(0, list(prompt), len(prompt), SamplingLaw(temperature), Streams(5))
    engine.add(context, Length(30), OutputOptions(**options))
    accepted = []
    while engine.busy:
        accepted += [step.accepted for step in engine.step()]
    return engine.take(0), accepted


def check(recorded: TokenLogprobs, history: list[int], token: int, count: int) -> None:
    row = TARGET.logits(history).log_softmax(-1)
    best = row.argsort(descending=True).tolist()
    assert recorded.token == token
    assert recorded.logprob == pytest.approx(float(row[token]), abs=1e-6)
    assert recorded.rank == best.index(token) + 1
    assert [alternative for alternative, _ in recorded.top] == best[:count]
    assert [value for _, value in recorded.top] == pytest.approx(row[best[:count]].tolist(), abs=1e-6)


@pytest.mark.parametrize(
    "proposer, temperature",
    [
        (Decoys(), 0.0),
        *(
            (DraftModel(TARGET.perturbed(0.2), DraftModelConfig(tree=tree)), 1.0)
            for tree in ("chain", "top_k", "sampled")
        ),
    ],
    ids=["decoys", "chain", "fixed tree", "drawn tree"],
)
def test_every_emitted_token_has_its_own_row(proposer: Proposer, temperature: float) -> None:
    sequence, accepted = finished(proposer, [1, 2, 3], temperature, logprobs=3)
    tokens = sequence.context.tokens
    assert len(sequence.recorded) == 30 and max(accepted) > 1
    for place, recorded in enumerate(sequence.recorded, start=3):
        check(recorded, tokens[:place], tokens[place], 3)


@pytest.mark.parametrize("length", [2, 128, 300])
def test_every_token_of_a_prompt_has_the_row_before_it(length: int) -> None:
    prompt = [(3 * i * i) % 7 for i in range(length)]
    sequence, _ = finished(Proposer(), prompt, 1.0, prompt_logprobs=2)
    assert len(sequence.prompt_recorded) == length - 1
    for place, recorded in enumerate(sequence.prompt_recorded, start=1):
        check(recorded, prompt[:place], prompt[place], 2)


@pytest.mark.parametrize("depth", [0, 4])
def test_pieces_hold_the_log_probabilities_of_their_own_tokens(tiny_pair: Any, depth: int) -> None:
    llm = LLM(tiny_pair.target, tiny_pair.target, dtype="float32")  # drafts for itself, so that blocks are accepted
    params = SamplingParams(
        max_tokens=20, seed=3, logprobs=2, explain=True, ignore_eos=True, speculative_tokens=depth, n=2
    )
    pieces = list(llm.stream("def greet(name):\n", params))
    assert not depth or max(piece.step.accepted for piece in pieces) > 1
    for piece in pieces:
        assert piece.logprobs is not None and piece.explained is not None
        assert len(piece.explained.emitted_prob) == len(piece.token_ids) or piece.output is not None
        for token, entries, came in zip(piece.token_ids, piece.logprobs, piece.explained.emitted_prob, strict=False):
            assert entries[token].logprob == pytest.approx(log(came), abs=1e-4)
    for index in range(2):
        own = [piece for piece in pieces if piece.index == index]
        output = own[-1].output
        assert output is not None
        assert tuple(entries for piece in own for entries in piece.logprobs or ()) == output.logprobs
