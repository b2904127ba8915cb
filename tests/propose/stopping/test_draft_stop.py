"""Chains that end early: where the rule says, for each sequence alone, and with the same tokens before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.propose.stopping.heads import random_head

from foretoken import LLM, SamplingParams
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.law import PointMass, Sampled
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.models.base import Scores
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Observation
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.early_exit import EarlyExitConfig
from foretoken.propose.stopping.base import Stop
from foretoken.propose.stopping.margin import MarginEstimate, MarginStop
from foretoken.propose.vocabulary import VocabularyConfig

DRAFT = ToyModel(vocab_size=7, order=2, seed=1, sharpness=2.0)
DEPTH = 8
PROMPTS = [[1, 2, 3, i] for i in range(6)]


def context(i: int = 0, grade: Exactness = Exactness.DISTRIBUTION, **law: float) -> Context:
    return Context(i, list(PROMPTS[i]), 4, SamplingLaw(**law), Streams(i), grade)  # type: ignore[arg-type]


def drafter(stop: Any, **keys: Any) -> DraftModel:
    return DraftModel(DRAFT, DraftModelConfig(draft_stop=stop, **keys))


@pytest.fixture
def rules(tmp_path: Path) -> dict[str, Callable[[], DraftModel]]:
    """Proposers whose drafts end sometimes at once, sometimes never."""

    def margin() -> DraftModel:
        made = drafter({"rule": "margin", "warmup": 0, "probe": 10_000, "threshold": 0.3})
        assert isinstance(made.stop, MarginStop)
        for kind in ("greedy", "distribution", "trajectory"):  # as if learned: only wide margins are to be trusted
            made.stop.estimates[kind] = MarginEstimate(pooled=torch.tensor([2.0, -2.0]).numpy())
        return made

    head = random_head(tmp_path / "head", DRAFT.hidden_size, scale=1.0)
    return {
        "entropy": lambda: drafter({"rule": "entropy", "threshold": 0.5}),
        "margin": margin,
        "learned": lambda: drafter({"rule": "learned", "model": head, "threshold": 0.6}),
    }


RULES = ["entropy", "margin", "learned"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.0}, {"grade": Exactness.TRAJECTORY}, {"temperature": 0.7, "presence_penalty": 0.5}],
    ids=["drawn", "greedy", "trajectory", "penalized"],
)
def test_a_stopped_chain_is_a_prefix_of_the_whole_one(rule: str, settings: dict[str, Any], rules: Any) -> None:
    lengths = set()
    for i in range(len(PROMPTS)):
        whole = DraftModel(DRAFT).propose([context(i, **settings)], [DEPTH])[0]
        draft = rules[rule]().propose([context(i, **settings)], [DEPTH])[0]
        assert draft.ids == whole.ids[: len(draft)]
        assert isinstance(draft.law, type(whole.law) if len(draft) else PointMass)
        if isinstance(draft.law, Sampled) and isinstance(whole.law, Sampled):
            assert torch.equal(draft.law.probs, whole.law.probs[: len(draft)])
        lengths.add(len(draft))
    assert min(lengths) < DEPTH, lengths
    assert max(lengths) > 0, lengths


@pytest.mark.parametrize("rule", RULES)
def test_drafts_of_a_batch_are_those_of_each_alone(rule: str, rules: Any) -> None:
    contexts = [context(i) for i in range(len(PROMPTS))]
    budgets = [8, 0, 3, 8, 1, 8]
    together = rules[rule]().propose(contexts, budgets)
    for c, budget, draft in zip(contexts, budgets, together, strict=True):
        alone = rules[rule]().propose([c], [budget])[0]
        assert draft.ids == alone.ids
        assert len(draft) <= budget


def test_the_entropy_of_the_row_decides_where() -> None:
    """The rule, computed by hand from the draft's own law."""
    for i in range(len(PROMPTS)):
        c = context(i, top_p=0.9)
        draft = drafter({"rule": "entropy", "threshold": 0.5}).propose([c], [DEPTH])[0]
        for depth in range(len(draft) + (len(draft) < DEPTH)):
            path = draft.ids[:depth]
            q = c.law.probs(DRAFT.logits([*PROMPTS[i], *path])[None], [c.history(path)])[0]
            bound = 1 - (0.2 * float(torch.special.entr(q).sum())) ** 0.5
            assert (bound < 0.5) == (depth == len(draft))


def test_a_draft_may_end_before_it_begins() -> None:
    draft = drafter({"rule": "entropy", "threshold": 1.0}).propose([context()], [DEPTH])[0]
    assert len(draft) == 0
    assert isinstance(draft.law, PointMass)


def test_a_rule_sees_the_drawn_distribution_and_of_greedy_requests_temperature_one() -> None:
    seen: list[torch.Tensor] = []

    class Watching(Stop):
        def begin(self, context: Context) -> Any:
            return self

        def stops(self, row: torch.Tensor, hidden: torch.Tensor | None) -> bool:
            seen.append(row)
            return False

    proposer = DraftModel(DRAFT)
    proposer.stop = Watching()
    draft = proposer.propose([context(top_k=3)], [4])[0]
    assert isinstance(draft.law, Sampled)
    assert torch.equal(torch.stack(seen), draft.law.probs)
    seen.clear()
    draft = proposer.propose([context(1, temperature=0.0)], [2])[0]
    assert torch.equal(seen[1], DRAFT.probs([*PROMPTS[1], *draft.ids[:1]]))


def test_a_rule_observes_only_its_own_drafts() -> None:
    observed: list[Draft] = []

    class Listening(Stop):
        def observe(self, context: Context, step: StepOutput) -> None:
            observed.append(step.draft)

    proposer, c = DraftModel(DRAFT), context()
    proposer.stop = Listening()
    nothing = Scores(torch.zeros(1, 7))

    def observe(draft: Draft) -> None:
        step = StepOutput(0, 0, draft, Verdict((), 1), (1,), Timings(0, 0, 0, 0, 1))
        c.tokens.append(1)
        proposer.observe([c], [Observation(step, nothing)])

    own = proposer.propose([c], [3])[0]
    observe(own)
    observe(own)  # a step without its draft
    proposer.propose([c], [3])
    observe(Draft.chain([1, 2]))
    assert observed == [own]
    proposer.forget(c)


def test_trees_take_no_stopping_rule() -> None:
    with pytest.raises(InvalidRequest, match="draft_stop ends chains, and tree is 'top_k'"):
        DraftModelConfig(tree="top_k", draft_stop="entropy")
    for config in (EarlyExitConfig, VocabularyConfig):
        with pytest.raises(InvalidRequest, match="draft_stop must be"):
            config(draft_stop="soon")


@pytest.mark.slow
def test_every_draft_with_hidden_states_takes_every_rule(tiny_pair: Any, tmp_path: Path) -> None:
    """A model, the target's own first layers, and a draft of another vocabulary; the text is the target's."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    plain = LLM(tiny_pair.target, dtype="float32").generate("def greet", params)[0].outputs[0].token_ids
    methods = (("draft_model", 32), ("early_exit", 64), ("vocabulary", 32))
    for method, hidden in methods:
        config = {"method": method, "num_speculative_tokens": 6}
        if method != "early_exit":
            config["model"] = str(tiny_pair.draft)
        if method == "vocabulary":
            config["algorithm"] = "tli"
        head = str(random_head(tmp_path / method, hidden))
        for stop in ("entropy", "margin", {"rule": "learned", "model": head, "threshold": 0.8}):
            llm = LLM(tiny_pair.target, speculative_config=config | {"draft_stop": stop}, dtype="float32")
            output = llm.generate("def greet", params)[0]
            assert output.outputs[0].token_ids == plain
            seeded = SamplingParams(max_tokens=12, ignore_eos=True)
            llm.generate(["def greet", "for i"], seeded)
