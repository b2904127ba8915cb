"""The method "auto": what it drafts, what requests may choose, and that no text changes."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams, SpeculativeConfig, zoo
from foretoken.bench.workloads import FUNCTIONS
from foretoken.control.policy import DraftPolicy
from foretoken.core import devices
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.costs.model import CostModel
from foretoken.engine.warmup import warm_up
from foretoken.models.loading import load_model
from foretoken.models.toy import ToyModel
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.per_request import PerRequestProposer
from foretoken.propose.recycling import Recycling
from foretoken.propose.union import Auto, Union, UnionMember
from foretoken.speculation import Builder

TEXT = FUNCTIONS[0]
AUTO = {"method": "auto", "model": str(zoo.path("draft"))}


@pytest.fixture(scope="module")
def pair() -> LLM:
    return LLM(zoo.path("draft"), speculative_config=AUTO, dtype="float32", max_model_len=256)


def completed(llm: LLM, **params: Any) -> Any:
    return llm.generate(TEXT, SamplingParams(max_tokens=16, ignore_eos=True, **params))[0].outputs[0]


def test_requests_may_choose_the_draft_model_alone(pair: LLM) -> None:
    assert pair.methods == ("auto", "draft_model")
    chosen = pair.engine.proposer
    assert isinstance(chosen, PerRequestProposer) and isinstance(chosen.members["auto"], Auto)
    alone = chosen.members["draft_model"]
    assert isinstance(alone, Union) and isinstance(alone.sources[0].proposer, DraftModel)
    assert chosen.kv_bytes_per_token == chosen.members["draft_model"].kv_bytes_per_token
    for params in ({"speculative_tokens": 3}, {"speculative_method": "draft_model", "speculative_tokens": 3}):
        stats = completed(pair, temperature=0.0, **params).stats
        assert len(stats.drafted_per_position) == 3 and stats.drafted >= 3 * (stats.drafts - 2)
    assert completed(pair, temperature=0.0, speculative_tokens=0).stats.drafted == 0
    with pytest.raises(InvalidRequest, match="loaded: auto, draft_model"):
        completed(pair, speculative_method="suffix")


def test_no_request_is_drafted_from_the_text_of_another() -> None:
    llm = LLM(zoo.path("draft"), speculative_config=AUTO, dtype="float32", max_model_len=256)
    chosen = llm.engine.proposer
    assert isinstance(chosen, PerRequestProposer) and isinstance(chosen.members["auto"], Auto)
    suffix = next(source.proposer for source in chosen.members["auto"].copies if source.name == "suffix")
    prompt = llm.tokenizer.encode("zebra quince")
    done = llm.generate(["zebra quince"], SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))
    again = Context(10**6, [*prompt, done[0].outputs[0].token_ids[0]], len(prompt), SamplingLaw(), Streams(0))
    assert len(suffix.propose([again], [8])[0]) == 0


def test_another_method_becomes_the_default(pair: LLM) -> None:
    plain = completed(pair, temperature=0.0, speculative_tokens=0).token_ids
    pair.use_method("draft_model")
    try:
        assert pair.methods == ("draft_model", "auto")
        assert completed(pair, temperature=0.0).token_ids == plain
        assert completed(pair, temperature=0.0, speculative_method="auto", speculative_tokens=4).token_ids == plain
    finally:
        pair.use_method("auto")


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.slow
def test_no_text_changes(params: dict[str, Any]) -> None:
    """In a batch, with stop strings, prefix-cache hits, preemption, predictions and other methods beside it."""
    none = {"method": "none"}
    plain = LLM(zoo.path("target"), speculative_config=none, dtype="float32", max_model_len=192)
    if not plain.target.batch_invariant:
        pytest.skip("rows are not promised to be independent in float32 on this machine")
    memory = 256 * plain.target.kv_bytes_per_token
    options: dict[str, Any] = {"enable_prefix_caching": True, "kv_cache_memory_bytes": memory}
    llm = LLM(speculative_config={"method": "auto"}, dtype="float32", max_model_len=192, **options)
    prompts = ["import os\nimport sys\n" * 4 + f"def {name}(" for name in ("read", "write", "close", "x")]

    def texts(llm: LLM, **more: Any) -> list[tuple[int, ...]]:
        own = SamplingParams(max_tokens=100, stop=["\n\n\n\n"], **params, **more)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, own)]

    expected = texts(plain)
    assert texts(llm) == expected
    assert texts(llm, speculative_method="auto", speculative_tokens=12, prediction=TEXT) == expected
    assert texts(llm, speculative_tokens=4) == expected
    usage = llm.engine.usage
    assert usage.preemptions and usage.prefix_hits


def test_warm_up_times_the_model_of_a_union() -> None:
    target, policy = ToyModel(vocab_size=8, order=2, seed=3, max_length=512), DraftPolicy()
    recycling, model = (
        UnionMember("recycling", Recycling(8)),
        UnionMember("draft_model", DraftModel(target.perturbed(0.1))),
    )
    warm_up(target, Union([recycling, model], policy, "mixture"), policy.costs, 8)
    assert policy.costs.drafting.known and policy.costs.known
    alone = DraftPolicy()
    warm_up(target, Union([recycling], alone, "mixture"), alone.costs, 8)
    assert alone.costs.known and not alone.costs.drafting.known


def test_what_only_the_first_draft_takes_is_not_catching_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def later(seconds: float = 1e-3) -> float:
        """The time by a clock that goes on by a millisecond whenever it is read."""
        nonlocal now
        now += seconds
        return now

    class Cold(DraftModel):
        """Allocates for a moment when it drafts for the first time."""

        cold = True

        def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
            if self.cold and any(budgets):
                self.cold = False
                later(0.05)
            return super().propose(contexts, budgets)

    target, costs = ToyModel(vocab_size=8, order=2, seed=3, max_length=512), CostModel()
    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=later))
    warm_up(target, Cold(target.perturbed(0.1)), costs, 4)
    assert 0.0 < costs.drafting.missed(32) < 0.02


@pytest.mark.parametrize("model", [True, False])
def test_the_union_drafts_with_and_without_a_model(pair: LLM, model: bool) -> None:
    text, models = pair.tokenizer.encode("x = [1, 2, 3]\n" * 6), {"dtype": "float32", "max_length": 256}
    builder = Builder(pair.target, pair.tokenizer, None, lambda other: load_model(Path(other), **models))
    chosen = builder.build(SpeculativeConfig.of(AUTO if model else {"method": "auto"}))
    assert isinstance(chosen, Auto) and (chosen.model is not None) == model
    assert list(chosen.alone) == (["draft_model"] if model else [])
    context = Context(10**6, [*text], len(text), SamplingLaw(temperature=0.0), Streams(0), depth=6)
    with torch.inference_mode():
        (draft,) = chosen.propose([context], [6])
    assert len(draft) == 6 and draft.scores is not None
    assert draft.decision is not None and set(draft.decision.sources) <= {"suffix", "draft_model"}
    chosen.forget(context)


def test_a_model_alone_drafts_by_the_union_of_text(pair: LLM) -> None:
    """It is the default, changes no text, and speeds up text that repeats."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}
    llm = LLM(zoo.path("draft"), **options)
    assert llm.methods == ("auto",) and llm.speculative_config.method_in_force == "auto"
    plain = LLM(zoo.path("draft"), speculative_config={"method": "none"}, **options)
    params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    outputs = [one.generate("x = 1\n" * 12, params)[0].outputs[0] for one in (plain, llm)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[1].stats.steps <= outputs[0].stats.steps == 120


def test_a_request_has_as_many_drawn_tokens_as_it_asks_for(pair: LLM) -> None:
    """Also beyond the depth of a tree."""
    assert len(completed(pair, temperature=1.0, speculative_tokens=12).stats.drafted_per_position) == 12


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_drafts_up_to_the_end_of_the_context(pair: LLM, temperature: float) -> None:
    proposer = pair.engine.proposer
    near = pair.tokenizer.encode(TEXT * 9)[: pair.target.max_length - 6]
    context = Context(10**6, near, len(near), SamplingLaw(temperature=temperature), Streams(0), depth=5)
    with torch.inference_mode():
        draft = proposer.propose([context], [5])[0]
    proposer.forget(context)
    assert len(draft) >= 4  # of a tree, one level
