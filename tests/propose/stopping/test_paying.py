"""Chains that end where the next token would not pay."""

from __future__ import annotations

import warnings

import torch

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.models.base import Scores
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Observation
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.stopping.paying import PayingChains

DRAFT = ToyModel(vocab_size=7, order=2, seed=1, sharpness=2.0)
PROMPT = [1, 2, 3, 4]


def context(*floors: float, number: int = 0, temperature: float = 0.0) -> Context:
    return Context(number, list(PROMPT), 4, SamplingLaw(temperature=temperature), Streams(number), floors=floors)


def drafted(proposer: DraftModel, own: Context, budget: int = 8) -> Draft:
    with torch.inference_mode():
        return proposer.propose([own], [budget])[0]


def verified(proposer: DraftModel, own: Context, draft: Draft, accepted: int, token: int) -> None:
    """The target accepts so many tokens of the draft and continues with ``token``."""
    tokens = (*draft.ids[:accepted], token)
    position = own.generated
    own.tokens.extend(tokens)
    timings = Timings(0.0, 0.0, 0.0, 0.0, 1)
    step = StepOutput(own.id, position, draft, Verdict(tuple(range(accepted)), token), tokens, timings, budget=8)
    proposer.observe([own], [Observation(step, Scores(torch.zeros(len(draft) + 1, 7)))])


def taught(right: bool) -> DraftModel:
    """A proposer whose drafts of many requests were all right, or all wrong."""
    proposer = DraftModel(DRAFT)
    for number in range(1, 120):
        own = context(0.0, number=number)
        draft = drafted(proposer, own)
        verified(proposer, own, draft, len(draft) if right else 0, (draft.ids[0] + 1) % 7)
        proposer.forget(own)
    return proposer


def test_a_chain_without_floors_uses_its_budget() -> None:
    assert len(drafted(DraftModel(DRAFT), context())) == 8
    assert len(drafted(DraftModel(DRAFT), context(0.0))) == 8


def test_drawn_chains_use_their_budget() -> None:
    own = context(1.0, temperature=1.0)
    assert len(drafted(DraftModel(DRAFT), own)) == 8 and not DraftModel(DRAFT).prunes(own)


def test_a_chain_ends_where_its_next_token_would_not_pay() -> None:
    proposer = DraftModel(DRAFT)
    lengths = [len(drafted(proposer, context(floor, number=i))) for i, floor in enumerate((0.02, 0.3, 1.0))]
    assert lengths[0] > lengths[1] >= lengths[2] == 0


def test_deeper_tokens_may_cost_more() -> None:
    assert len(drafted(taught(right=True), context(0.1, 0.1, 0.1, 1.1))) == 3


def test_drafts_that_were_right_grow_longer_than_those_that_were_wrong() -> None:
    right, wrong = (drafted(taught(how), context(0.25)) for how in (True, False))
    assert len(right) == 8 and len(wrong) == 0


def test_a_chain_that_ended_early_tells_its_passes() -> None:
    proposer = taught(right=True)
    assert drafted(proposer, context(0.1, 0.1, 1.1)).levels == 3
    assert drafted(proposer, context(0.1, number=1)).levels is None


def test_a_token_that_was_left_out_and_right_is_learned_from() -> None:
    proposer = taught(right=False)
    assert len(drafted(proposer, context(0.25))) == 0
    for number in range(200, 400):
        own = context(0.25, number=number)
        draft = drafted(proposer, own)
        likeliest = drafted(DraftModel(DRAFT), context(), 1).ids[0]
        verified(proposer, own, draft, len(draft), likeliest if not len(draft) else 0)
        proposer.forget(own)
    assert len(drafted(proposer, context(0.25))) > 0


def test_a_token_far_below_the_likeliest_has_no_chance() -> None:
    """A request's bias or grammar may choose such a token; that is no overflow."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PayingChains().begin(context(1e-9)).ends(torch.tensor([200.0, -200.0, 0.0]), 1)
    assert not PayingChains().begin(context(1e-9)).ends(torch.tensor([200.0, -200.0, 0.0]), 0)


def test_only_chains_without_a_rule_of_their_own_leave_out_what_does_not_pay() -> None:
    own = context()
    assert DraftModel(DRAFT).prunes(own)
    assert not DraftModel(DRAFT, DraftModelConfig(tree="sampled")).prunes(own)
    assert not DraftModel(DRAFT, DraftModelConfig(draft_stop="margin")).prunes(own)
