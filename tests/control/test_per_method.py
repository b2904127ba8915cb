"""Each request has the draft length of its method, settled when it is queued."""

from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.control.fixed import Fixed
from foretoken.control.limited import Limited
from foretoken.control.per_method import MethodLength, PerMethod
from foretoken.control.policy import DraftPolicy
from foretoken.core.context import Context
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams

PROMPT = "a = 1\nb = 1\n" * 6
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def context(method: str | None = None, depth: int | None = None) -> Context:
    return Context(0, [1, 2, 3], 3, SamplingLaw(), Streams(0), depth=depth, method=method)


def test_lengths_follow_the_method() -> None:
    default = ["none"]
    lengths = {"none": MethodLength(0, True), "ngram": MethodLength(5, False), "suffix": MethodLength(3, True)}
    control = PerMethod(Fixed(9), lengths, lambda c: c.method or default[0], lambda: default[0])
    limited = Limited(control)
    requests = [context(), context("ngram"), context("suffix"), context("none", 4), context("suffix", 7)]
    for each in requests:
        limited.admit(each)
    assert [each.method for each in requests] == ["none", "ngram", "suffix", "none", "suffix"]
    assert limited.budgets(requests, [20] * 5) == [0, 5, 3, 0, 7]
    assert limited.budgets(requests, [2] * 5) == [0, 2, 2, 0, 2]
    assert limited.describe() | {"memory_halvings": 0} == {"name": "fixed", "max_tokens": 0, "memory_halvings": 0}
    default[0] = "ngram"
    assert limited.describe()["max_tokens"] == 5 and limited.budgets(requests[:1], [20]) == [0], "it keeps its method"
    late = context()
    limited.admit(late)
    assert late.method == "ngram" and limited.budgets([late], [20]) == [5]
    limited.limit = 2
    assert limited.budgets(requests, [20] * 5) == [0, 2, 2, 0, 2]


def drafted(llm: LLM, **params: Any) -> int:
    (output,) = llm.generate([PROMPT], SamplingParams(**GREEDY, **params))
    return output.stats.drafted


def test_a_model_without_a_drafter_drafts_by_the_methods_that_requests_name(tiny_pair: Any) -> None:
    """A constant length makes this independent of measured seconds."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    plain, suffix = {"method": "none"}, {"method": "suffix", "num_speculative_tokens": 2}
    llm = LLM(tiny_pair.target, dtype="float32", speculative_config=plain, methods=[ngram, suffix])
    assert llm.methods[0] == "none" and drafted(llm) == 0
    assert drafted(llm, speculative_method="ngram") > 0 and drafted(llm, speculative_method="suffix") > 0
    llm.use_method("ngram")
    assert drafted(llm) > 0
    assert max(len(step.draft) for step in steps(llm)) == 3
    assert drafted(llm, speculative_method="none") == 0
    llm.use_method("none")
    assert drafted(llm) == 0


def steps(llm: LLM) -> list[Any]:
    seen = [piece.step for piece in llm.stream([PROMPT], SamplingParams(**GREEDY))]
    return [step for step in seen if step is not None]


def test_texts_do_not_depend_on_the_method(tiny_pair: Any) -> None:
    llm = LLM(tiny_pair.target, dtype="float32", methods=["ngram", "suffix"])
    for params in (GREEDY, {**GREEDY, "temperature": 0.8, "seed": 3}):
        made = [SamplingParams(**params, speculative_method=name) for name in llm.methods]
        outputs = llm.generate([PROMPT] * len(made), made)
        assert len({tuple(each.outputs[0].token_ids) for each in outputs}) == 1


def inner(llm: LLM) -> Any:
    control: Any = llm.engine.controller
    assert isinstance(control, PerMethod)
    return control


def test_the_controller_is_that_of_the_methods(tiny_pair: Any) -> None:
    plain = {"method": "none"}
    named = inner(LLM(tiny_pair.target, dtype="float32", speculative_config=plain, methods=["ngram"]))
    assert isinstance(named.inner, DraftPolicy) and named.inner.max_tokens == 16
    assert named.lengths == {"none": MethodLength(0, True), "ngram": MethodLength(16, False)}
    config = {"method": "draft_model", "num_speculative_tokens": 4}
    more = ["ngram", {"method": "suffix", "num_speculative_tokens": 6}]
    constant = inner(LLM(tiny_pair.target, tiny_pair.draft, speculative_config=config, dtype="float32", methods=more))
    assert isinstance(constant.inner, Fixed), "methods that set no length have that of the default"
    assert [length.max_tokens for length in constant.lengths.values()] == [4, 4, 6]
    more = [{"method": "ngram", "control": "goodput"}, "suffix"]
    mixed = inner(LLM(tiny_pair.target, tiny_pair.draft, speculative_config=config, dtype="float32", methods=more))
    assert isinstance(mixed.inner, DraftPolicy)
    assert {name: length.constant for name, length in mixed.lengths.items()} == {
        "draft_model": True,
        "ngram": False,
        "suffix": True,
    }
    guarded = {"method": "ngram", "num_speculative_tokens": 2, "control": {"name": "fixed", "guard": True}}
    charged = inner(LLM(tiny_pair.target, dtype="float32", methods=[guarded]))
    assert charged.inner.ledger is not None and charged.lengths["ngram"] == MethodLength(2, False)


@pytest.mark.parametrize("adaptive", ["default", "other"])
def test_passes_are_timed_if_any_method_needs_it(adaptive: str, tiny_pair: Any) -> None:
    other = "ngram" if adaptive == "other" else {"method": "suffix", "num_speculative_tokens": 2}
    draft = tiny_pair.draft if adaptive == "default" else None
    llm = LLM(tiny_pair.target, draft, dtype="float32", methods=[other])
    costs = llm.engine.controller.costs
    assert costs is not None and costs.pass_seconds(1) > 0
