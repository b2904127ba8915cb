from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from tests.models.trees import repeating

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.workloads import FUNCTIONS
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.law import Sampled
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.costs.model import CostModel
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose.acceptance import BucketedMeans, DecayingMean, MemberRecord, NodeRates, PendingDraft, ScoredRates
from foretoken.propose.base import Needs, Proposer
from foretoken.propose.mixture import Mixture
from foretoken.propose.mixture_members import Member, MixtureConfig
from foretoken.propose.pace import DraftingCosts
from foretoken.propose.union import DraftUnion

TARGET = ToyModel(vocab_size=8, order=2, seed=3, sharpness=6.0)


@dataclass
class Oracle(Proposer):
    """Knows the greedy text, but is wrong in stretches of 40 tokens: the even ones (0 in ``wrong``), the odd (1)."""

    wrong: tuple[int, ...] = ()
    calls: int = 0
    needs: Needs = field(default_factory=Needs)

    def propose(self, contexts, budgets):
        self.calls += 1
        return [self.draft(c, b) for c, b in zip(contexts, budgets, strict=True)]

    def draft(self, context, budget):
        tokens = list(context.tokens)
        for _ in range(budget):
            right = int(TARGET.logits(tokens).argmax())
            tokens.append((right + 1) % 8 if len(tokens) // 40 % 2 in self.wrong else right)
        return Draft.chain(tokens[len(context.tokens) :])


def run(proposer: Proposer, tokens: int = 400, requests: int = 1, nodes: int = 4) -> tuple[list[list[int]], int]:
    """Returns texts, and the number of target passes."""
    engine, num_steps = Engine(TARGET, proposer, Fixed(nodes), max_sequences=requests), 0
    contexts = [Context(i, [1, 2, i], 3, SamplingLaw(temperature=0.0), Streams(i)) for i in range(requests)]
    for context in contexts:
        engine.add(context, Length(tokens))
    while engine.busy:
        engine.step()
        num_steps += 1
    return [c.tokens[3:] for c in contexts], num_steps


def free(name: str, proposer: Proposer) -> Member:
    return Member(name, proposer, free=True)


def test_each_stretch_of_text_goes_to_the_member_that_predicts_it() -> None:
    """Two members that are right in turn: with a budget of one node, the mixture is right nearly everywhere."""
    mixture = Mixture([free("one", Oracle((0,))), free("other", Oracle((1,)))])
    texts, num_steps = run(mixture, nodes=1)
    assert texts == run(Proposer())[0]
    alone = min(run(Oracle((0,)), nodes=1)[1], run(Oracle((1,)), nodes=1)[1])
    assert num_steps < 0.8 * alone


@pytest.mark.parametrize("cost, used", [(0.05, True), (50.0, False)])
def test_a_costly_member_is_used_where_it_pays(cost: float, used: bool) -> None:
    good, poor = Oracle(), Oracle((0, 1))
    mixture = Mixture([free("poor", poor), Member("good", good, free=False, max_nodes=4, cost=cost)])
    texts, num_steps = run(mixture)
    assert texts == run(Proposer())[0]
    if used:
        assert num_steps < 100
        assert good.calls > 0.9 * num_steps
    else:
        assert good.calls < 0.15 * num_steps  # tried, and tried again ever more seldom


class Declining(Oracle):
    """Has nothing that would pay, and says so each time it is asked."""

    def draft(self, context, budget):
        return Draft.empty()

    def caught_up(self, context):
        return True


def test_a_costly_member_that_declines_is_asked_ever_more_seldom() -> None:
    declining = Declining()
    mixture = Mixture([free("poor", Oracle((0, 1))), Member("declining", declining, free=False, cost=0.5)])
    assert run(mixture)[0] == run(Proposer())[0]
    assert 8 <= declining.calls < 60  # of 400 steps


def test_fixed_candidates_of_a_costly_member_join_the_tree() -> None:
    """Each knows what the other does not, so together they are right everywhere."""
    one, other = free("one", Oracle((0,))), Member("other", Oracle((1,)), free=False, max_nodes=4, cost=0.05)
    mixture = Mixture([one, other])
    texts, num_steps = run(mixture, nodes=8)
    assert texts == run(Proposer())[0]
    assert num_steps < 0.7 * min(run(Oracle((0,)), nodes=4)[1], run(Oracle((1,)), nodes=4)[1])
    context = Context(9, [1, 2, 3], 3, SamplingLaw(temperature=0.0), Streams(0))
    mixture = Mixture([one, Member("other", Oracle((1,)), free=False, max_nodes=4, cost=0.05)])
    draft = mixture.propose([context], [8])[0]
    assert not draft.is_chain and mixture.last_member[9].count("other") == 4 and "one" in mixture.last_member[9]


def test_a_costly_members_drawn_draft_replaces_the_tree() -> None:
    class Drawn(Proposer):
        def propose(self, contexts, budgets):
            return [Draft.chain([1], Sampled(torch.ones(1, 8) / 8)) for _ in contexts]

    context = Context(0, [1, 2, 3], 3, SamplingLaw(), Streams(0))
    mixture = Mixture([free("fixed", Oracle()), Member("drawn", Drawn(), free=False, max_nodes=1)])
    draft = mixture.propose([context], [4])[0]
    assert isinstance(draft.law, Sampled) and mixture.last_member[0] == ("drawn",)


def test_a_member_of_a_mixture_is_no_mixture() -> None:
    for method in ("mixture", "auto"):
        with pytest.raises(InvalidRequest, match="list its members"):
            MixtureConfig(members=[{"method": method}])


def test_a_member_that_may_draft_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="num_speculative_tokens of a member"):
        MixtureConfig(members=[{"method": "draft_model", "num_speculative_tokens": 0}])


def test_a_request_starts_from_what_others_learned() -> None:
    mixture = Mixture([free("poor", Oracle((0, 1))), Member("good", Oracle(), free=False, max_nodes=4, cost=0.05)])
    run(mixture)
    calls = mixture.costly[0].proposer.calls
    _, num_steps = run(mixture, tokens=50)
    assert mixture.costly[0].proposer.calls - calls >= num_steps - 1


def test_last_member_names_the_member_of_each_node() -> None:
    mixture = Mixture([free("a", Oracle((1,))), free("b", Oracle((0,)))])
    texts, _ = run(mixture, tokens=40, requests=4)
    assert texts == run(Proposer(), tokens=40, requests=4)[0]
    assert mixture.last_member == {}  # all are over
    mixture = Mixture([free("a", Oracle((1,))), free("b", Oracle((0,)))])
    context = Context(9, [1, 2, 3], 3, SamplingLaw(temperature=0.0), Streams(0))
    draft = mixture.propose([context], [4])[0]
    assert len(mixture.last_member[9]) == len(draft) > 0
    assert set(mixture.last_member[9]) <= {"a", "b"}
    assert mixture.propose([context], [0])[0].ids == ()


def test_needs_are_those_of_all_members() -> None:
    members = [free("a", Oracle(needs=Needs((2, 5)))), Member("b", Oracle(needs=Needs((5, 1))), free=False)]
    assert Mixture(members).needs.taps == (1, 2, 5)


def test_drawn_drafts_do_not_join() -> None:
    class Drawn(Proposer):
        def propose(self, contexts, budgets):
            return [Draft.chain([1], Sampled(torch.ones(1, 8) / 8)) for _ in contexts]

    context = Context(0, [1, 2, 3], 3, SamplingLaw(), Streams(0))
    with pytest.raises(TypeError, match="fixed candidates"):
        Mixture([free("drawn", Drawn())]).propose([context], [2])


@pytest.mark.parametrize(
    "members, message",
    [
        ([], "one at least"),
        ("suffix", "list"),
        ([{"model": "x"}], "'method'"),
        ([{"method": "mixture"}], "cannot be a member"),
        ([{"method": "ngram", "cost": -1}], "cost"),
    ],
)
def test_bad_members_are_refused(members: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        MixtureConfig(members)  # type: ignore[arg-type]


# judging


def test_a_pending_draft_follows_the_text() -> None:
    rates = NodeRates()
    drafted = PendingDraft(Draft(torch.tensor([5, 6, 7, 8]), (-1, 0, 1, 0)), start=2)
    assert not drafted.follow([1, 2], rates)
    assert not drafted.follow([1, 2, 5], rates)
    assert drafted.depth == 1 and not drafted.missed([1, 2, 5])
    assert drafted.follow([1, 2, 5, 9], rates)
    assert drafted.depth == 1 and drafted.missed([1, 2, 5, 9])
    right = PendingDraft(Draft.chain([5, 6]), start=2)
    assert right.follow([1, 2, 5, 6, 4]) and right.depth == 2 and not right.missed([1, 2, 5, 6, 4])


def test_rates_are_unbiased_by_texts_that_end() -> None:
    """Chains right with probability 0.8 a token, but only two tokens of each are ever known."""
    generator = torch.Generator().manual_seed(0)
    account = MemberRecord(NodeRates(memory=1e9))
    for _ in range(3000):
        right = (torch.rand(4, generator=generator) < 0.8).tolist()
        account.open = [PendingDraft(Draft.chain([1, 1, 1, 1]), start=0)]
        account.settle([1 if right[0] else 0, 1 if right[1] else 0])
    rates = account.rates.of((0, 0), Draft.chain([1, 1, 1, 1]))
    assert rates[0] == pytest.approx(0.8, abs=0.03)
    assert rates[1] == pytest.approx(0.8, abs=0.03)


def test_nodes_of_a_model_have_the_rates_at_which_its_claims_came_true() -> None:
    """It is right in 6 of 10 where it claims 0.95, and then in 1 of 10 where it claims 0.55."""
    generator = torch.Generator().manual_seed(0)
    draft = Draft(torch.tensor([1, 1]), (-1, 0), scores=torch.tensor([0.95, 0.95 * 0.55]).log())
    account = MemberRecord(ScoredRates(memory=1e9))
    assert account.rates.of((0, 0), draft) == pytest.approx([0.95, 0.55], abs=1e-6)
    for _ in range(2000):
        account.add(draft, 0)
        first, second = torch.rand(2, generator=generator).tolist()
        account.settle([int(first < 0.6), int(second < 0.1), 0])
    assert account.rates.of((0, 0), draft) == pytest.approx([0.6, 0.1], abs=0.06)


def test_a_streak_ends_with_the_first_miss() -> None:
    account = MemberRecord(NodeRates())
    account.add(Draft.chain([1, 2]), 0)
    account.settle([1, 2, 3])
    assert account.streak == 2
    account.add(Draft.chain([4, 5]), 3)
    account.settle([1, 2, 3, 4, 9])
    assert account.streak == 0


def test_means_start_from_their_prior() -> None:
    shared = DecayingMean()
    for _ in range(50):
        shared.add(3.0)
    own = DecayingMean(shared)
    assert own.value == pytest.approx(3.0)
    for _ in range(50):
        own.add(0.0)
    assert own.value < 0.5


def test_bucketed_means_separate_promises() -> None:
    everywhere = BucketedMeans()
    own = BucketedMeans(everywhere, strength=8.0)
    for _ in range(50):
        own.at(0.5).add(3.0)
        own.at(8.0).add(0.0)
    assert own.at(0.3).value == pytest.approx(3.0, abs=0.3) and own.at(7.0).value == pytest.approx(0.0, abs=0.3)
    assert everywhere.at(0.6).value == pytest.approx(3.0, abs=0.3)
    assert own.at(2.0).value == pytest.approx(1.5, abs=0.3)  # nothing seen there: the mean of all


def test_a_union_merges_shared_paths() -> None:
    union = DraftUnion()
    assert union.add(Draft.chain([1, 2, 3]), [0.9, 0.8, 0.5], "a") == [0, 1, 2]
    assert union.add(Draft(torch.tensor([1, 4, 2]), (-1, -1, 0)), [0.5, 0.5, 0.9], "b") == [0, 3, 1]
    assert union.tokens == [1, 2, 3, 4] and union.parents == [-1, 0, 1, -1]
    assert union.owners == ["a", "b", "a", "b"]
    weights = union.weights()
    assert weights == pytest.approx([0.9, 0.81, 0.405, 0.1])  # of two siblings only one can stand
    draft = union.draft([0, 1, 3], weights)
    assert draft.ids == (1, 2, 4) and draft.parents == (-1, 0, -1)


def test_a_union_keeps_one_token_below_different_parents_apart() -> None:
    union, tree = DraftUnion(), repeating((-1, 0, -1, 2))
    assert union.add(tree, [0.5, 0.9, 0.4, 0.8], "a") == [0, 1, 2, 3]
    assert union.add(Draft.chain([6, 6]), [0.6, 0.7], "b") == [2, 3]
    draft = union.draft(range(4), union.weights())
    assert (draft.ids, draft.parents) == (tree.ids, tree.parents)
    assert union.owners == ["a", "a", "b", "a"]


class Counting(Oracle):
    """Records the budgets of its drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.budgets: list[int] = []

    def propose(self, contexts, budgets):
        self.budgets += budgets
        return super().propose(contexts, budgets)


class Known(CostModel):
    """Passes that take what was said beforehand."""

    def __init__(self, seconds: dict[int, float]) -> None:
        super().__init__()
        self.calibrate(seconds, {})

    def observe(self, steps) -> None:
        pass


@pytest.mark.parametrize("cliff, expected", [(1.1, 16), (4.0, 4)])
def test_a_costly_member_drafts_as_deep_as_pays(cliff: float, expected: int) -> None:
    """It is always right; its sixth row costs three passes, or nothing."""
    costs = Known({1: 1.0, 5: 1.05, 6: cliff, 17: cliff + 0.5})
    good = Counting()
    mixture = Mixture([free("poor", Oracle((0, 1))), Member("good", good, free=False, cost=0.1)], costs)
    texts, _ = run(mixture, nodes=16)
    assert texts == run(Proposer())[0]
    assert max(good.budgets[-10:]) == expected


# what rows cost


def steps(rows: int, seconds: float, position: int = 5) -> list[StepOutput]:
    draft = Draft.chain([0] * (rows - 1))
    return [StepOutput(0, position, draft, Verdict((), 0), (0,), Timings(0.0, seconds, 0.0, 0.0, 1))]


def test_pace_learns_what_a_row_costs() -> None:
    costs = CostModel()
    pace = DraftingCosts(costs)
    for i in range(200):
        rows = 1 + i % 8
        costs.observe(steps(rows, 1.0 + 0.1 * (rows - 1)))
    costs.observe(steps(4, 100.0))  # a disturbance
    costs.observe(steps(4, 100.0, position=0))  # a prompt
    assert pace.seconds(0, 1) == pytest.approx(1.0, rel=0.02)
    assert pace.seconds(10, 1) == pytest.approx(2.0, rel=0.02)
    # The second row brings .3 tokens for a tenth of a pass; the third .05.
    assert pace.worthwhile([0.3, 0.05], 8, 1) == [0]
    assert pace.worthwhile([0.9, 0.9, 0.8], 2, 1) == [0, 1]
    assert pace.worthwhile([0.3, 0.05], 8, 1, rate=4.0) == []  # a tenth of a pass usually brings .4 tokens
    assert pace.worthwhile([0.3, 0.05], 8, 1, rate=0.3) == [0, 1]
    assert pace.row(8, 1) == pytest.approx(0.1, rel=0.02)


def test_pace_before_anything_is_known() -> None:
    assert DraftingCosts(CostModel()).worthwhile([0.5, 0.001], 8, 1) == [0]
    assert DraftingCosts(CostModel()).worthwhile([], 8, 1) == []


# with real models


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.slow
def test_one_text_with_the_bundled_models(temperature: float) -> None:
    members = [
        {"method": "suffix"},
        {"method": "recycling"},
        {"method": "draft_model", "model": str(zoo.path("draft")), "num_speculative_tokens": 4},
    ]
    mixed = LLM(zoo.path("target"), speculative_config={"method": "mixture", "members": members})
    plain = LLM(zoo.path("target"))
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    prompts = list(FUNCTIONS[:4])
    texts = [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
    assert [o.outputs[0].token_ids for o in mixed.generate(prompts, params)] == texts
    assert [mixed.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts] == texts
