from __future__ import annotations

import pytest
import torch

from foretoken.core.context import Context, Exactness
from foretoken.core.law import PointMass, Sampled
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.models.toy import ToyModel
from foretoken.propose.draft_model import DraftModel, DraftModelConfig

DRAFT = ToyModel(vocab_size=7, order=2, seed=1, sharpness=2.0)


def context(identifier: int = 0, grade: Exactness = Exactness.DISTRIBUTION, **law: float) -> Context:
    return Context(identifier, [1, 2, 3], 3, SamplingLaw(**law), Streams(5), grade)  # type: ignore[arg-type]


def test_the_rows_are_the_laws_the_tokens_were_drawn_from() -> None:
    c = context(top_k=3, temperature=0.7, presence_penalty=0.5)
    draft = DraftModel(DRAFT).propose([c], [4])[0]
    assert isinstance(draft.law, Sampled)
    for i in range(4):
        path = draft.ids[:i]
        expected = c.law.probs(DRAFT.logits([1, 2, 3, *path])[None], [c.history(path)])[0]
        assert torch.equal(draft.law.probs[i], expected)
        assert draft.law.probs[i, draft.ids[i]] > 0


def test_argmax_drafts_are_fixed_candidates() -> None:
    for draft in (
        DraftModel(DRAFT).propose([context(temperature=0.0)], [3])[0],
        DraftModel(DRAFT, DraftModelConfig(temperature=0.0)).propose([context()], [3])[0],
    ):
        assert isinstance(draft.law, PointMass)
        assert draft.ids[0] == int(DRAFT.logits([1, 2, 3]).argmax())


def test_the_trajectory_grade_shares_the_targets_noise() -> None:
    c = context(grade=Exactness.TRAJECTORY)
    draft = DraftModel(DRAFT).propose([c], [3])[0]
    assert isinstance(draft.law, PointMass)
    row = c.law.probs(DRAFT.logits([1, 2, 3])[None], [c.history()])[0]
    assert draft.ids[0] == c.streams.shared(0).categorical(row, 0)


def test_each_sequence_has_its_own_depth() -> None:
    drafts = DraftModel(DRAFT).propose([context(i) for i in range(4)], [3, 0, 1, 5])
    assert [len(d) for d in drafts] == [3, 0, 1, 5]
    alone = DraftModel(DRAFT).propose([context(3)], [5])[0]
    assert drafts[3].ids == alone.ids


def test_a_full_draft_model_sits_out() -> None:
    short = ToyModel(vocab_size=7, max_length=5)
    assert [len(d) for d in DraftModel(short).propose([context(), context(1)], [2, 3])] == [2, 0]


def test_forgetting_is_safe_and_frees_the_place() -> None:
    model = ToyModel(vocab_size=7)
    proposer = DraftModel(model)
    c = context()
    proposer.forget(c)
    proposer.propose([c], [2])
    assert model._open
    proposer.forget(c)
    proposer.forget(c)
    assert not model._open


@pytest.mark.parametrize("wide", [5, 9])
def test_other_row_widths_are_fitted(wide: int) -> None:
    proposer = DraftModel(ToyModel(vocab_size=wide, sharpness=0.1), DraftModelConfig(vocab_size=7))
    draft = proposer.propose([context()], [6])[0]
    assert isinstance(draft.law, Sampled)
    assert draft.law.probs.shape == (6, 7)
    assert all(token < min(wide, 7) for token in draft.ids)
