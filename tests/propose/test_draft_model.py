from typing import Any, get_args

import pytest
import torch
from tests.propose.toys import TrackedToy

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, PointMass, Sampled, TopPlusSampled, WithoutReplacement
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Scores
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Observation, Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.growers import TreeKind

DRAFT = ToyModel(vocab_size=7, order=2, seed=1, sharpness=2.0)


def context(identifier: int = 0, grade: Exactness = Exactness.DISTRIBUTION, **law: float) -> Context:
    return Context(identifier, [1, 2, 3], 3, SamplingLaw(**law), Streams(5), grade)  # type: ignore[arg-type]


def test_drafts_carry_the_distributions_they_were_drawn_from() -> None:
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
        DraftModel(DRAFT, DraftModelConfig(draft_temperature=0.0)).propose([context()], [3])[0],
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


def test_a_text_beyond_the_context_window_is_not_drafted_for() -> None:
    short = ToyModel(vocab_size=7, max_length=5)
    assert [len(d) for d in DraftModel(short).propose([context(), context(1)], [2, 3])] == [2, 0]


def test_forgetting_twice_is_safe_and_frees_the_slot() -> None:
    model = TrackedToy(vocab_size=7)
    proposer = DraftModel(model)
    c = context()
    proposer.forget(c)
    proposer.propose([c], [2])
    assert model.open_slots
    proposer.forget(c)
    proposer.forget(c)
    assert not model.open_slots


@pytest.mark.parametrize("shape", get_args(TreeKind))
def test_after_any_verdict_it_drafts_as_after_one_prefill(shape: str) -> None:
    config, c = DraftModelConfig(tree=shape), context()  # type: ignore[arg-type]
    proposer, draft = DraftModel(DRAFT, config), DraftModel(DRAFT, config).propose([context()], [6])[0]
    proposer.propose([c], [6])
    for accepted in (0, 2, 1, 1, 3, 0):
        path = draft.path(max(range(len(draft)), key=lambda node: draft.depths[node]))[:accepted]
        tokens = (*(draft.ids[node] for node in path), (c.tokens[-1] + 1) % 7)
        c.tokens += tokens
        step = StepOutput(c.id, c.generated, draft, Verdict(path, tokens[-1]), tokens, Timings(0, 0, 0, 0, 1))
        proposer.observe([c], [Observation(step, Scores(torch.zeros(1, 7)))])
        draft = proposer.propose([c], [6])[0]
        fresh = DraftModel(DRAFT, config).propose([c], [6])[0]
        assert (draft.ids, draft.parents) == (fresh.ids, fresh.parents)
        assert type(draft.law) is type(fresh.law)
        if not isinstance(draft.law, PointMass):
            assert torch.equal(draft.law.probs, fresh.law.probs)


TREES = [kind for kind in get_args(TreeKind) if kind not in ("chain", "ranked", "at_once")]  # of a sampled draft


def tree(shape: str, budget: int = 6, c: Context | None = None, **config: int) -> Draft:
    drafter = DraftModel(DRAFT, DraftModelConfig(tree=shape, **config))  # type: ignore[arg-type]
    return drafter.propose([c or context(top_k=5, presence_penalty=0.5)], [budget])[0]


@pytest.mark.parametrize("shape", TREES)
def test_every_node_of_a_tree_has_its_own_history(shape: str) -> None:
    c = context(top_k=5, presence_penalty=0.5)
    draft = tree(shape, c=c)
    assert len(draft) == 6
    for node in (-1, *range(len(draft))):
        path = tuple(draft.ids[i] for i in draft.path(node))
        expected = c.law.probs(DRAFT.logits([1, 2, 3, *path])[None], [c.history(path)])[0]
        children = draft.children[node + 1]
        assert all(expected[draft.ids[child]] > 0.0 for child in children)
        if children and not isinstance(draft.law, PointMass):
            assert torch.equal(draft.law.probs[node + 1], expected)


def test_the_proposal_law_of_each_tree_matches_its_kind() -> None:
    kinds = {"top_k": PointMass, "sampled": WithoutReplacement, "greedy_multi": TopPlusSampled}
    for shape, kind in kinds.items():
        assert isinstance(tree(shape).law, kind)
        assert isinstance(tree(shape, c=context(temperature=0.0)).law, PointMass)
        assert isinstance(tree(shape, c=context(grade=Exactness.TRAJECTORY)).law, PointMass)


@pytest.mark.parametrize("shape", TREES)
def test_depth_and_siblings_are_bounded(shape: str) -> None:
    draft = tree(shape, budget=9, num_steps=2, top_k=3)
    assert max(draft.depths) == 2
    assert max(map(len, draft.children)) <= 3
    assert tree(shape, budget=5, num_steps=1, top_k=9).depths == (1,) * 5
    assert len(tree("chain", budget=9, num_steps=2)) == 2


def test_a_ranked_tree_is_a_chain_where_tokens_are_drawn() -> None:
    assert tree("ranked", budget=12).depths == tuple(range(1, 13)) and isinstance(tree("ranked").law, Sampled)
    for c in (context(temperature=0.0), context(grade=Exactness.TRAJECTORY)):
        assert not tree("ranked", 9, c).is_chain and isinstance(tree("ranked", 9, c).law, PointMass)


def test_a_tree_at_once_is_a_chain_but_for_greedy_requests() -> None:
    for c, law in ((context(), Sampled), (context(grade=Exactness.TRAJECTORY), PointMass)):
        assert tree("at_once", 12, c).depths == tuple(range(1, 13)) and isinstance(tree("at_once", 12, c).law, law)
    assert not tree("at_once", 9, context(temperature=0.0)).is_chain


def test_a_greedy_tree_holds_the_greedy_chain_and_the_seeded_one_the_seeded_chain() -> None:
    for c in (context(temperature=0.0), context(grade=Exactness.TRAJECTORY)):
        chain, spread = tree("chain", 3, c), tree("sampled", 40, c, num_steps=3)
        paths = {tuple(spread.ids[i] for i in spread.path(node)) for node in range(len(spread))}
        assert chain.ids in paths


@pytest.mark.parametrize("shape", TREES)
def test_trees_of_a_batch_are_those_of_each_alone(shape: str) -> None:
    contexts = [Context(i, [1, 2, 3, i], 3, SamplingLaw(), Streams(i)) for i in range(5)]
    drafter = DraftModel(DRAFT, DraftModelConfig(tree=shape))  # type: ignore[arg-type]
    drafts = drafter.propose(contexts, [8, 0, 3, 1, 5])
    for draft, c, budget in zip(drafts, contexts, [8, 0, 3, 1, 5], strict=True):
        alone = tree(shape, budget, c) if budget else Draft.empty()
        assert (draft.ids, draft.parents) == (alone.ids, alone.parents)
        assert len(draft) == budget


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"tree": "bush"}, "chain, top_k, ranked, at_once, sampled, greedy_multi"),
        ({"num_steps": 0}, "num_steps must be an integer of at least 1"),
        ({"top_k": True}, "top_k must be an integer"),
        ({"draft_temperature": -1.0}, "draft_temperature must be a number"),
    ],
)
def test_bad_configurations_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        DraftModelConfig(**keys)


@pytest.mark.parametrize("wide", [5, 9])
def test_rows_of_another_width_are_fitted(wide: int) -> None:
    proposer = DraftModel(ToyModel(vocab_size=wide, sharpness=0.1), vocab_size=7)
    draft = proposer.propose([context()], [6])[0]
    assert isinstance(draft.law, Sampled)
    assert draft.law.probs.shape == (6, 7)
    assert all(token < min(wide, 7) for token in draft.ids)


def test_a_long_text_is_prefilled_in_chunks_before_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.propose.draft_model.PREFILL_CHUNK", 8)
    target = ToyModel(vocab_size=7, order=2, seed=4)
    prompt = [(3 * i) % 7 for i in range(40)]

    def run(proposer: Proposer) -> tuple[list[int], list[int]]:
        engine = Engine(target, proposer, Fixed(3))
        c = Context(0, list(prompt), 40, SamplingLaw(), Streams(5), Exactness.TRAJECTORY)
        engine.add(c, Length(30))
        drafted = []
        while engine.busy:
            drafted += [len(step.draft) for step in engine.step()]
        return c.tokens, drafted

    tokens, drafted = run(DraftModel(DRAFT))
    assert tokens == run(Proposer())[0]
    # The text grows by a token a step meanwhile, so the sixth chunk holds its end.
    assert drafted[:5] == [0] * 5 and drafted[5] == 3
