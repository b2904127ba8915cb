"""The warm-up of a model with experts times passes over tokens that differ."""

from collections.abc import Sequence

import pytest

from foretoken.core.draft import Draft
from foretoken.costs.model import CostModel
from foretoken.engine.warmup import warm_up
from foretoken.models.base import Handle, Scores
from foretoken.models.toy import ToyModel
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.suffix import Lookup


class Watched(ToyModel):
    """Keeps the drafts of all passes."""

    def __init__(self, has_experts: bool) -> None:
        super().__init__(vocab_size=50, order=1, seed=3, max_length=2000)
        self.has_experts = has_experts
        self.drafts: list[Draft] = []

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        self.drafts += drafts
        return super().score(handles, drafts, taps)


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("costless", [False, True])
def test_tokens_of_timed_passes_differ(has_experts: bool, costless: bool) -> None:
    target, costs = Watched(has_experts), CostModel()
    proposer = Lookup() if costless else DraftModel(ToyModel(vocab_size=50, order=1, seed=4, max_length=2000))
    warm_up(target, proposer, costs, 16)
    assert costs.known and costs.pass_seconds(17) > 0 and costs.drafting.known is not costless
    widest = [draft for draft in target.drafts if len(draft) == 16]
    assert all(len(set(draft.ids)) > 8 for draft in widest[:3]) and bool(widest) >= (costless or has_experts)
