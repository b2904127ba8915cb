"""Chains that end where a token is reached with less than the minimum acceptance."""

import warnings

import pytest
import torch

from foretoken.core.context import ChainEnd, Context
from foretoken.core.draft import Draft
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.models.toy import ToyModel
from foretoken.propose.chain import _probability
from foretoken.propose.draft_model import DraftModel, DraftModelConfig

DRAFT = ToyModel(vocab_size=7, order=2, seed=1, sharpness=2.0)
PROMPT = [1, 2, 3, 4]


def context(*minimum: float, temperature: float = 0.0, rate: float | None = None) -> Context:
    """Claims come true as they are, or at ``rate``."""
    end = ChainEnd((), (rate or 0.0,), (0.0 if rate else 1.0,), minimum) if minimum else None
    return Context(0, list(PROMPT), 4, SamplingLaw(temperature=temperature), Streams(0), end=end)


def drafted(own: Context, budget: int = 8) -> Draft:
    with torch.inference_mode():
        return DraftModel(DRAFT).propose([own], [budget])[0]


def test_a_chain_without_a_minimum_uses_its_budget() -> None:
    assert len(drafted(context())) == 8
    assert len(drafted(context(0.0))) == 8


def test_sampled_chains_use_their_budget() -> None:
    own = context(1.0, temperature=1.0)
    assert len(drafted(own)) == 8 and not DraftModel(DRAFT).ends_early(own)


def test_a_chain_ends_with_the_first_token_below_the_minimum() -> None:
    lengths = [len(drafted(context(minimum))) for minimum in (0.02, 0.3, 1.0)]
    assert lengths[0] > lengths[1] >= lengths[2] == 1
    assert drafted(context(1.0)).levels == 1 and drafted(context(0.0)).levels is None


def test_deeper_tokens_may_cost_more() -> None:
    draft = drafted(context(0.1, 0.1, 0.1, 1.1, rate=0.99))
    assert len(draft) == 4 and draft.levels == 4


def test_the_rate_at_which_claims_come_true_counts() -> None:
    assert len(drafted(context(0.25, rate=0.99))) == 8
    assert len(drafted(context(0.25, rate=0.5))) == 3


def test_the_draft_states_its_claims() -> None:
    draft = drafted(context(0.02))
    assert draft.scores is not None
    claims = [float(DRAFT.probs([*PROMPT, *draft.ids[:depth]])[token]) for depth, token in enumerate(draft.ids)]
    assert draft.scores == pytest.approx(torch.tensor(claims).log().cumsum(0).tolist(), abs=1e-5)


def test_a_token_far_below_the_likeliest_has_no_chance() -> None:
    """A request's bias or grammar may choose such a token; that is no overflow."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _probability(torch.tensor([200.0, -200.0, 0.0]), 1) == 0.0
    assert _probability(torch.tensor([200.0, -200.0, 0.0]), 0) == 1.0


def test_greedy_chains_and_scored_ones_end_early() -> None:
    greedy, sampled = context(), context(temperature=1.0)
    assert DraftModel(DRAFT).ends_early(greedy) and not DraftModel(DRAFT).ends_early(sampled)
    assert DraftModel(DRAFT, DraftModelConfig(draft_stop="margin")).ends_early(sampled)
