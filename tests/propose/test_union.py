"""The union of several sources: one tree of fixed candidates, or a model's sampled chain in its place."""

from dataclasses import dataclass, field

import pytest
import torch
from tests.models.trees import repeating

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.workloads import FUNCTIONS
from foretoken.control.fixed import Fixed
from foretoken.control.policy import DraftPolicy
from foretoken.core.context import Context
from foretoken.core.draft import Draft, Sampled
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.costs.model import CostModel
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose.base import MEMBERS, Needs, Proposer
from foretoken.propose.union import DraftUnion, MixtureConfig, Union, UnionMember

TARGET = ToyModel(vocab_size=8, order=2, seed=3, sharpness=6.0)
GREEDY = SamplingLaw(temperature=0.0)


@dataclass
class Oracle(Proposer):
    """Drafts the greedy text, with errors in stretches of 40 tokens: the even ones (0 in ``wrong``), the odd (1)."""

    wrong: tuple[int, ...] = ()
    calls: int = 0
    needs: Needs = field(default_factory=Needs)
    costless: bool = True

    def propose(self, contexts, budgets):
        self.calls += any(budgets)
        return [self.draft(c, b) for c, b in zip(contexts, budgets, strict=True)]

    def draft(self, context, budget):
        tokens = list(context.tokens)
        for _ in range(budget):
            right = int(TARGET.logits(tokens).argmax())
            tokens.append((right + 1) % 8 if len(tokens) // 40 % 2 in self.wrong else right)
        return Draft.chain(tokens[len(context.tokens) :])


class SampledDraft(Proposer):
    """Samples one token."""

    def propose(self, contexts, budgets):
        return [Draft.chain([1], Sampled(torch.ones(1, 8) / 8)) if budget else Draft.empty() for budget in budgets]


class Known(CostModel):
    """A cost model whose seconds never change: of passes by rows, and of a draft token."""

    def __init__(self, seconds: dict[int, float], level: float = 0.05) -> None:
        super().__init__()
        depths = (1, 2, 4, 8, 16)
        self.calibrate(seconds, {depth: level * depth for depth in depths} if level else {})

    def observe(self, steps) -> None:
        pass

    def plain_seconds(self, batch: int) -> float:
        return self.pass_seconds(batch)

    def plain_due(self, batch: int) -> bool:
        return False


CHEAP = {1: 1.0, 17: 1.32}


def union(*proposers: Proposer, seconds: dict[int, float] = CHEAP, level: float = 0.05, nodes: int = 4) -> Union:
    """Returns the union of proposers named a, b, ..."""
    policy = DraftPolicy(Known(seconds, level), nodes)
    return Union(
        [UnionMember(name, proposer) for name, proposer in zip("abc", proposers, strict=False)], policy, "union"
    )


def run(proposer: Proposer, tokens: int = 400, requests: int = 1, nodes: int = 4) -> tuple[list[list[int]], int]:
    """Returns texts, and the number of target passes."""
    control = proposer.policy if isinstance(proposer, Union) else Fixed(nodes)
    engine, num_steps = Engine(TARGET, proposer, control, max_sequences=requests), 0
    contexts = [Context(i, [1, 2, i], 3, GREEDY, Streams(i)) for i in range(requests)]
    for context in contexts:
        engine.add(context, Length(tokens))
    while engine.busy:
        engine.step()
        num_steps += 1
    return [c.tokens[3:] for c in contexts], num_steps


def test_each_stretch_of_text_goes_to_the_source_that_predicts_it() -> None:
    """Two sources that are right in turn: with a budget of one node, the union is right nearly everywhere."""
    texts, num_steps = run(union(Oracle((0,)), Oracle((1,)), nodes=1))
    assert texts == run(Proposer())[0]
    alone = min(run(Oracle((0,)), nodes=1)[1], run(Oracle((1,)), nodes=1)[1])
    assert num_steps < 0.85 * alone


@pytest.mark.parametrize("level, used", [(0.05, True), (3.0, False)])
def test_a_model_drafts_where_it_is_profitable(level: float, used: bool) -> None:
    good = Oracle(costless=False)
    texts, num_steps = run(union(Oracle((0, 1)), good, level=level))
    assert texts == run(Proposer())[0]
    if used:
        assert num_steps < 110 and good.calls > 0.9 * num_steps
    else:
        assert good.calls < 0.05 * num_steps  # trials


class Declining(Oracle):
    """Ends its drafts before the first token, after a pass."""

    def draft(self, context, budget):
        return Draft((), (), levels=1)


def test_a_model_that_drafts_nothing_gets_ever_fewer_trials() -> None:
    declining = Declining(costless=False)
    assert run(union(Oracle((0, 1)), declining))[0] == run(Proposer())[0]
    assert 1 <= declining.calls < 60  # of 400 steps


def test_fixed_candidates_of_a_model_join_the_tree() -> None:
    """Each predicts what the other does not, so together they are right everywhere."""
    texts, num_steps = run(union(Oracle((0,)), Oracle((1,), costless=False), nodes=8))
    assert texts == run(Proposer())[0]
    assert num_steps < 0.75 * min(run(Oracle((0,)), nodes=4)[1], run(Oracle((1,)), nodes=4)[1])
    context = Context(9, [1, 2, 3], 3, GREEDY, Streams(0), depth=8)
    joined = union(Oracle((0,)), Oracle((1,), costless=False), nodes=8)
    draft = joined.propose([context], [8])[0]
    assert not draft.is_chain and len(draft) == 8
    assert draft.decision is not None and set(draft.decision.sources) == {"a", "b"}


def test_a_models_sampled_chain_takes_the_place_of_the_tree() -> None:
    context = Context(0, [1, 2, 3], 3, SamplingLaw(), Streams(0), depth=4)
    joined = union(Oracle(), SampledDraft())
    draft = joined.propose([context], [4])[0]
    assert isinstance(draft.law, Sampled)
    assert draft.decision is not None and draft.decision.sources == ("b",)


def test_nothing_is_kept_of_a_request_under_a_constant_length() -> None:
    joined = union(Oracle((1,)), Oracle((0,), costless=False))
    engine = Engine(TARGET, joined, Fixed(4))
    engine.add(Context(0, [1, 2, 3], 3, GREEDY, Streams(0)), Length(20))
    while engine.busy:
        engine.step()
    assert joined.policy.num_known == 0


def test_a_request_starts_from_what_others_showed() -> None:
    good = Oracle(costless=False)
    joined = union(Oracle((0, 1)), good)
    run(joined)
    calls = good.calls
    _, num_steps = run(joined, tokens=50)
    assert good.calls - calls >= num_steps - 3


def test_a_decision_names_the_source_of_each_node() -> None:
    joined = union(Oracle((1,)), Oracle((0,)))
    texts, _ = run(joined, tokens=40, requests=4)
    assert texts == run(Proposer(), tokens=40, requests=4)[0]
    assert joined.policy.num_known == 0  # all have ended
    context = Context(9, [1, 2, 3], 3, GREEDY, Streams(0), depth=4)
    draft = joined.propose([context], [4])[0]
    decision = draft.decision
    assert decision is not None and len(decision.sources) == len(draft) > 0
    assert set(decision.sources) <= {"a", "b"} and decision.candidates >= len(draft)
    assert decision.price > 0.0 and decision.expected > 0.0 and decision.speedup >= 1.0
    assert joined.propose([context], [0])[0].ids == ()


def test_needs_are_those_of_all_sources() -> None:
    joined = union(Oracle(needs=Needs((2, 5))), Oracle(needs=Needs((5, 1)), costless=False))
    assert joined.needs.taps == (1, 2, 5)


def test_two_models_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most one member that is a model, got a, b"):
        union(SampledDraft(), Oracle(costless=False))


def test_a_union_of_one_source_is_that_source() -> None:
    policy, proposer = DraftPolicy(), Oracle()
    joined = Union.of(proposer, policy)
    assert joined.sources[0].proposer is proposer and Union.of(joined, policy) is joined
    context = Context(1, [1, 2, 3], 3, GREEDY, Streams(0), depth=4)
    assert joined.propose([context], [4])[0].ids == proposer.propose([context], [4])[0].ids


@pytest.mark.parametrize("member", [name for name in MEMBERS if callable(getattr(Proposer, name))])
def test_every_method_of_a_source_is_called(member: str) -> None:
    """A union forwards all of the interface; only the policy asks ``ends_early``."""
    called: list[str] = []

    class Watched(SampledDraft):
        kv_bytes_per_token = 1

        def observe(self, contexts: object, observations: object) -> None:
            called.append("observe")

        def __getattribute__(self, name: str) -> object:
            called.append(name)
            return super().__getattribute__(name)

    joined = union(Watched())
    context = Context(0, [1, 2, 3], 3, GREEDY, Streams(0), depth=2)
    arguments = {
        "propose": ([context], [2]),
        "prefill": ([], []),
        "observe": ([], []),
        "enable_prefix_cache": (1024,),
    }.get(member, (context,))
    called.clear()
    getattr(joined, member)(*arguments)
    assert member in called or member == "ends_early"


def test_a_member_of_a_mixture_is_no_mixture() -> None:
    for method in ("mixture", "auto"):
        with pytest.raises(InvalidRequest, match="list its members"):
            MixtureConfig(members=[{"method": method}])


def test_a_member_that_may_draft_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="num_speculative_tokens of a member"):
        MixtureConfig(members=[{"method": "draft_model", "num_speculative_tokens": 0}])


@pytest.mark.parametrize(
    "members, message",
    [([], "one at least"), ("suffix", "list"), ([{"model": "x"}], "'method'"), ([{"method": "mixture"}], "cannot be")],
)
def test_bad_members_are_refused(members: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        MixtureConfig(members)  # type: ignore[arg-type]


@pytest.mark.parametrize("cliff, expected", [(1.1, 16), (4.0, 4)])
def test_a_model_drafts_up_to_the_step_of_the_cost_curve(cliff: float, expected: int) -> None:
    """It is always right; its sixth row costs three passes, or nothing."""
    verified: list[int] = []

    class Counting(Union):
        def propose(self, contexts, budgets):
            drafts = super().propose(contexts, budgets)
            verified.extend(map(len, drafts))
            return drafts

    seconds = {1: 1.0, 5: 1.05, 6: cliff, 17: cliff + 0.5}
    joined = union(Oracle((0, 1)), Oracle(costless=False), seconds=seconds, level=0.01, nodes=16)
    texts, _ = run(Counting(joined.sources, joined.policy, "union"), nodes=16)
    assert texts == run(Proposer())[0]
    assert max(verified[-10:]) == expected


# merging


def test_a_union_merges_shared_paths() -> None:
    merged = DraftUnion()
    assert merged.add(Draft.chain([1, 2, 3]), [0.9, 0.8, 0.5], "a") == [0, 1, 2]
    assert merged.add(Draft.tree([1, 4, 2], (-1, -1, 0)), [0.5, 0.5, 0.9], "b") == [0, 3, 1]
    assert merged.tokens == [1, 2, 3, 4] and merged.parents == [-1, 0, 1, -1]
    assert merged.owners == ["a", "b", "a", "b"]
    weights = merged.weights()
    assert weights == pytest.approx([0.9, 0.81, 0.405, 0.1])  # of two siblings only one can stand
    draft = merged.draft([0, 1, 3], weights, 2)
    assert draft.ids == (1, 2, 4) and draft.parents == (-1, 0, -1) and draft.levels == 2


def test_a_union_keeps_one_token_below_different_parents_apart() -> None:
    merged, tree = DraftUnion(), repeating((-1, 0, -1, 2))
    assert merged.add(tree, [0.5, 0.9, 0.4, 0.8], "a") == [0, 1, 2, 3]
    assert merged.add(Draft.chain([6, 6]), [0.6, 0.7], "b") == [2, 3]
    draft = merged.draft(range(4), merged.weights(), 0)
    assert (draft.ids, draft.parents) == (tree.ids, tree.parents)
    assert merged.owners == ["a", "a", "b", "a"]


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
    plain = LLM(zoo.path("target"), speculative_config={"method": "none"})
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    prompts = list(FUNCTIONS[:4])
    texts = [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
    assert [o.outputs[0].token_ids for o in mixed.generate(prompts, params)] == texts
    assert [mixed.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts] == texts
