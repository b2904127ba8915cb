"""A proposer's knowledge of one request shows in drafts of requests with the same ``cache_salt``, and in no others."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch

from foretoken.control.policy import DraftPolicy
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.models.base import Handle, Scores
from foretoken.models.heads.feature_net import HeadHandle
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Observation, Proposer
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.eagle import Eagle
from foretoken.propose.per_request import FallbackProposer, PerRequestProposer
from foretoken.propose.pieces import Pieces
from foretoken.propose.prediction import Prediction
from foretoken.propose.recycling import Recycling, RecyclingConfig
from foretoken.propose.remote import Remote
from foretoken.propose.remote_transports import DraftEndpoint, start_thread
from foretoken.propose.remote_worker import DraftingWorker
from foretoken.propose.suffix import Lookup, Suffix
from foretoken.propose.union import Union, UnionMember
from foretoken.propose.vocabulary import Vocabulary, VocabularyConfig

VOCAB, BUDGET = 100, 12
PROMPT = [1, 2, 3, 4, 5, 6]
SECRET = list(range(40, 60))
PLAIN = [7, 8, 9, 10, 11, 12, 7, 8, 9]


def mixture() -> Union:
    members = [Suffix(), Recycling(VOCAB), Prediction(), Lookup()]
    return Union([UnionMember(member.name, member) for member in members], DraftPolicy(), "mixture")


def remote() -> Remote:
    def work(endpoint: DraftEndpoint) -> None:
        DraftingWorker(Suffix(), endpoint).run()

    return Remote(start_thread(work))


LEARNING: dict[str, Callable[[], Proposer]] = {
    "suffix": Suffix,
    "recycling": lambda: Recycling(VOCAB, RecyclingConfig(top_k=3)),
    "mixture": mixture,
    "several methods, and a failing one": lambda: FallbackProposer(
        PerRequestProposer({"suffix": Suffix(), "none": Proposer()})
    ),
    "remote": remote,
}


def request(identifier: int, cache_salt: str | None, prompt: Sequence[int] = PROMPT) -> Context:
    law = SamplingLaw(temperature=0.0)
    return Context(identifier, list(prompt), len(prompt), law, Streams(0), cache_salt=cache_salt)


def emit(proposer: Proposer, context: Context, text: Sequence[int]) -> list[Draft]:
    """Emits ``text``, one token a step, from rows that rank the next ids highest. Returns the drafts."""
    drafts = []
    for place, token in enumerate(text):
        (draft,) = proposer.propose([context], [BUDGET])
        drafts.append(draft)
        logits = torch.zeros(len(draft) + 1, VOCAB)
        logits[:, 90:] = 0.5  # ids of no text here
        logits[:, [token, *text[place + 1 : place + 3]]] = 1.0
        position = context.generated
        context.tokens.append(token)
        reason = "length" if place == len(text) - 1 else None
        step = StepOutput(context.id, position, draft, Verdict((), token), (token,), Timings(0, 0.01, 0, 0, 1), reason)
        proposer.observe([context], [Observation(step, Scores(logits))])
    context.finish_reason = "length"
    proposer.forget(context)
    return drafts


def drafted(drafts: Sequence[Draft]) -> set[int]:
    return {token for draft in drafts for token in draft.ids}


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("salt, other_salt", [("a", "b"), ("a", None), (None, "b")])
def test_a_secret_text_is_never_drafted_in_another_scope(name: str, salt: str | None, other_salt: str | None) -> None:
    proposer = LEARNING[name]()
    emit(proposer, request(1, salt), SECRET)
    same = drafted(emit(proposer, request(2, salt), [*SECRET[:4], *PLAIN]))
    assert same & set(SECRET[4:]), "the control: requests of one scope do learn from each other"
    other = drafted(emit(proposer, request(3, other_salt), PLAIN))
    begun = drafted(emit(proposer, request(4, other_salt, [*PROMPT, *SECRET[:4]]), PLAIN))
    assert not other & set(SECRET)
    assert not begun & set(SECRET[4:]), "a client that guesses the beginning of a secret text learns nothing of its end"


@pytest.mark.parametrize("name", ["suffix", "recycling"])
def test_drafts_are_those_of_a_proposer_that_never_saw_the_other_scope(name: str) -> None:
    alone, shared = LEARNING[name](), LEARNING[name]()
    victim = request(1, "a")
    for number in range(2, 6):
        emit(shared, request(10 + number, "a"), SECRET)
        before = emit(shared, victim, SECRET[number : number + 2])  # another scope's request is still running
        assert len(before) == 2
        one, other = (emit(each, request(number, "b"), [*PLAIN, *PROMPT]) for each in (alone, shared))
        assert [(d.ids, d.parents) for d in one] == [(d.ids, d.parents) for d in other]


def test_one_batch_may_mix_scopes() -> None:
    proposer = Suffix()
    emit(proposer, request(1, "a"), SECRET)
    contexts = [request(2, "a"), request(3, "b"), request(4, None)]
    drafts = proposer.propose(contexts, [4, 4, 4])
    assert [d.ids for d in drafts] == [tuple(SECRET[:4]), (), ()]


class Opened(ToyModel):
    """Remembers the salts of the sequences that it opened."""

    def open(self, prompt: Any, source: Any = (), cache_salt: str | None = None, *more: Any) -> Handle:
        self.salts = [*getattr(self, "salts", []), cache_salt]
        return super().open(prompt, source)


def test_a_drafts_own_cache_is_opened_with_the_salt(tokenizer: Any) -> None:
    pieces, contexts = Pieces(tokenizer), [request(1, "a", [50, 60, 70]), request(2, None, [50, 60, 70])]
    for algorithm in (None, "tli", "slem"):
        model = Opened(len(tokenizer), order=1, seed=1)
        proposer: Proposer = DraftModel(model)
        if algorithm is not None:
            config = VocabularyConfig(algorithm=algorithm)
            proposer = Vocabulary(model, pieces, pieces, len(tokenizer), config)
        proposer.propose(contexts, [3, 3])
        assert model.salts == ["a", None]


def test_a_heads_own_cache_is_opened_with_salt_and_adapter() -> None:
    opened = []

    class Net:
        joined, max_length, drafts_chains = True, 512, False

        def open(self, tokens: Sequence[int] = (), scope: Hashable = None) -> HeadHandle:
            opened.append(scope)
            return HeadHandle(0, [])

    eagle = Eagle(Net(), (1,))  # type: ignore[arg-type]
    for number, (salt, adapter) in enumerate([("a", None), ("a", "x"), (None, "a")]):
        context = request(number, salt)
        context.adapter = adapter
        eagle.reusable_prefix_len(context)
    assert opened == [("a", None), ("a", "x"), (None, "a")]
