"""The method "auto": what it drafts, what requests may choose, and that no text changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams, SpeculativeConfig, zoo
from foretoken.bench.workloads import FUNCTIONS
from foretoken.control.goodput_controller import Goodput
from foretoken.control.per_method import PerMethod
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.part import DraftPart
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.costs.model import CostModel
from foretoken.engine import clock
from foretoken.engine.warmup import warm_up
from foretoken.models.loading import load_model
from foretoken.models.toy import ToyModel
from foretoken.propose.auto import Auto
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.mixture import Mixture
from foretoken.propose.mixture_members import Member
from foretoken.propose.per_request import PerRequestProposer
from foretoken.propose.recycling import Recycling
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
    assert isinstance(chosen.members["draft_model"], DraftModel)
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
    suffix = next(member.proposer for member in chosen.members["auto"].free if member.name == "suffix")
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
    plain = LLM(zoo.path("target"), dtype="float32", max_model_len=192)
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


def test_warm_up_times_the_model_of_a_mixture() -> None:
    target, costs = ToyModel(vocab_size=8, order=2, seed=3, max_length=512), CostModel()
    model = DraftModel(target.perturbed(0.1))
    mixture = Mixture([Member("recycling", Recycling(8), free=True), Member("draft_model", model, free=False)], costs)
    warm_up(target, mixture, costs, 8)
    assert costs.drafting.known and costs.known
    alone = CostModel()
    warm_up(target, Mixture([Member("recycling", Recycling(8), free=True)], alone), alone, 8)
    assert alone.known and not alone.drafting.known


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
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=later))
    warm_up(target, Cold(target.perturbed(0.1)), costs, 4)
    assert 0.0 < costs.drafting.missed(32) < 0.02


def test_each_part_drafts_without_the_others(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text, models = pair.tokenizer.encode("x = [1, 2, 3]\n" * 6), {"dtype": "float32", "max_length": 256}
    builder = Builder(pair.target, pair.tokenizer, None, lambda other: load_model(Path(other), **models))
    chosen = builder.build(SpeculativeConfig.of(AUTO))  # which knows no times, and so prunes alike on every machine

    def draft(part: DraftPart) -> Draft:
        context = Context(10**6, [*text], len(text), SamplingLaw(temperature=0.0), Streams(0), part=part)
        with torch.inference_mode():
            (made,) = chosen.propose([context], [6])
        chosen.forget(context)
        return made

    alone = draft(DraftPart.MODEL)
    assert alone.is_chain and len(alone) == 6 and alone.scores is None
    with monkeypatch.context() as patched:
        patched.setattr(DraftModel, "propose", None)
        free = draft(DraftPart.FREE)
    assert len(free) and free.scores is not None
    assert len(draft(DraftPart.ALL)) >= len(free)


def test_requests_whose_drafts_are_pruned_get_their_whole_budget(pair: LLM) -> None:
    per_method, proposer = pair.engine.controller, pair.engine.proposer
    assert isinstance(per_method, PerMethod)
    controller = per_method.inner
    assert isinstance(controller, Goodput) and controller.max_tokens == 16

    def pruned(method: str | None, depth: int | None = None, temperature: float = 1.0) -> bool:
        law = SamplingLaw(temperature=temperature)
        return controller.prunes(Context(10**6, [1], 1, law, Streams(0), depth=depth, method=method))

    assert pruned(None) and pruned("auto") and not pruned("draft_model") and not pruned(None, depth=4)
    assert pruned("draft_model", temperature=0.0)
    pair.use_method("draft_model")
    try:
        assert not pruned(None) and pruned("auto")
    finally:
        pair.use_method("auto")
    assert controller.prunes == proposer.prunes


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
