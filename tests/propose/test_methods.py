"""The default method, and methods registered in the process or found as entry points of packages."""

import logging
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
from tests.models.heads import tiny

from foretoken import LLM, SamplingParams, SpeculativeConfig, zoo
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.costs.model import CostModel
from foretoken.propose import methods
from foretoken.propose.base import Method, Proposer
from foretoken.propose.methods import ENTRY_POINTS, METHODS, check_method, find, register
from foretoken.speculation import with_draft, with_method

DRAFT = str(zoo.path("draft"))


@pytest.mark.parametrize("key", [{"tree": "sampled"}, {"num_speculative_tokens": 3}, {"control": "fixed"}])
def test_a_draft_model_with_keys_drafts_by_the_method_of_its_name(key: dict[str, Any]) -> None:
    assert with_method(SpeculativeConfig.of({"model": DRAFT, **key})).method_in_force == "draft_model"


def test_a_draft_model_without_keys_drafts_by_auto() -> None:
    for config in (with_draft(SpeculativeConfig.of({}), DRAFT), SpeculativeConfig(model=DRAFT, control="goodput")):
        assert with_method(config).method_in_force == "auto"
    assert with_method(SpeculativeConfig.of({"model": DRAFT, "method": "vocabulary"})).method == "vocabulary"
    assert with_method(SpeculativeConfig.of({})).method_in_force == "auto"


@pytest.mark.parametrize("seconds", [0.0004, 0.06])
def test_the_default_does_not_depend_on_the_time_of_a_pass(seconds, tiny_pair, monkeypatch):
    monkeypatch.setattr(CostModel, "plain_seconds", lambda self, batch: seconds * batch)
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", methods=["draft_model"])
    assert llm.methods == ("auto", "draft_model") and llm.speculative_config.method_in_force == "auto"
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True, speculative_tokens=4)
    plain = LLM(tiny_pair.target, speculative_config={"method": "none"}, dtype="float32")
    drafted = llm.generate("def greet(name):", params)[0].outputs[0]
    assert drafted.token_ids == plain.generate("def greet(name):", params)[0].outputs[0].token_ids
    assert drafted.stats.drafted > 0


@pytest.mark.parametrize("role", ["eagle3", "medusa", "blockwise"])
def test_heads_draft_by_their_own_method(role: str) -> None:
    config = SpeculativeConfig.of({"num_speculative_tokens": 4})
    found = with_method(with_draft(config, zoo.path(role)))
    assert (found.method, found.num_speculative_tokens) == (role, 4)
    assert with_draft(SpeculativeConfig(method=role), zoo.path(role)).method == role
    with pytest.raises(InvalidRequest, match="'ngram' takes no draft model"):
        with_draft(SpeculativeConfig(method="ngram"), zoo.path(role))


def test_heads_named_as_a_draft_model_are_refused_with_their_method(tiny_pair: Any) -> None:
    with pytest.raises(InvalidRequest, match="use method 'medusa' with this model"):
        LLM(tiny_pair.target, zoo.path("medusa"), speculative_config={"method": "draft_model"})


def test_heads_in_the_targets_folder_draft_unless_they_do_not_fit(tiny_pair, tmp_path, caplog):
    folder = tiny.linked(tiny_pair.target, tmp_path / "target")
    plain = LLM(folder, dtype="float32")
    assert plain.methods == ("auto",)
    (folder / "heads").mkdir()
    (folder / "heads" / "medusa").symlink_to(zoo.path("medusa"))  # of another target
    with caplog.at_level(logging.WARNING):
        assert LLM(folder, dtype="float32").methods == ("auto",)
    assert "'medusa', which are skipped" in caplog.text
    tiny.save(folder / "heads" / "eagle3", *tiny.eagle3(vocab=plain.target.vocab_size))
    llm = LLM(folder, dtype="float32")
    assert llm.methods == ("auto", "eagle3") and llm.speculative_config.method_in_force == "auto"
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True, speculative_tokens=4)
    texts = [one.generate("def greet(name):", params)[0].outputs[0] for one in (plain, llm)]
    assert texts[0].token_ids == texts[1].token_ids and texts[1].stats.drafted > 0
    assert LLM(folder, dtype="float32", speculative_config={"method": "none"}).methods == ("none",)


def test_the_draft_model_of_auto_may_be_listed_as_a_method(tiny_pair: Any) -> None:
    options: dict[str, Any] = {"speculative_config": {"method": "auto"}, "dtype": "float32"}
    llm = LLM(tiny_pair.target, tiny_pair.draft, methods=["draft_model", "ngram"], **options)
    assert llm.methods == ("auto", "draft_model", "ngram")
    with pytest.raises(InvalidRequest, match="two ways to speculate are named 'draft_model'"):
        LLM(tiny_pair.target, tiny_pair.draft, methods=[{"method": "draft_model", "top_k": 2}], **options)


@dataclass(frozen=True)
class RepeatConfig:
    times: int = 2


class Repeat(Proposer):
    """Drafts the last token again."""

    name = "repeat"

    def __init__(self, times: int) -> None:
        self.times = times

    def propose(self, contexts, budgets):
        return [Draft.chain([c.tokens[-1]] * min(self.times, b)) for c, b in zip(contexts, budgets, strict=True)]


METHOD = Method(RepeatConfig, lambda config, context: Repeat(config.times))


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(methods, "_registered", {})


def test_a_registered_method_is_built_by_its_name(tiny_pair):
    register("repeat", METHOD)
    params = SamplingParams(max_tokens=8, temperature=0)
    config = {"method": "repeat", "times": 3, "control": "fixed"}  # by measured costs no draft might be profitable
    (drafted,) = LLM(tiny_pair.target, speculative_config=config).generate("def f", params)
    (plain,) = LLM(tiny_pair.target, speculative_config={"method": "none"}).generate("def f", params)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.stats.drafted > 0 == plain.stats.drafted


def test_a_registered_method_has_keys_of_its_own():
    register("repeat", METHOD)
    assert SpeculativeConfig.of({"method": "repeat", "times": 5}).own() == RepeatConfig(5)
    with pytest.raises(InvalidRequest, match="times"):
        SpeculativeConfig.of({"method": "repeat", "tines": 5})


def test_a_registered_method_says_whether_it_takes_a_draft_model():
    register("repeat", METHOD)
    with pytest.raises(InvalidRequest, match="'repeat' takes no draft model"):
        with_draft(SpeculativeConfig(method="repeat"), "draft")
    register("repeat", replace(METHOD, takes_draft_model=True))
    assert with_draft(SpeculativeConfig(method="repeat"), "draft").model == "draft"


@pytest.mark.parametrize("name", ["ngram", "none"])
def test_names_of_built_in_methods_stay_theirs(name):
    with pytest.raises(InvalidRequest, match="is built in"):
        register(name, METHOD)


def test_an_unknown_name_is_refused_with_all_known_ones():
    register("repeat", METHOD)
    with pytest.raises(InvalidRequest, match=r"'telepathy' is not known; known: draft_model, .*repeat, none"):
        check_method("telepathy")


def test_an_installed_package_adds_a_method_by_an_entry_point(monkeypatch):
    entry = EntryPoint("repeat", f"{__name__}:METHOD", ENTRY_POINTS)
    monkeypatch.setattr(EntryPoint, "load", lambda self: METHOD)  # this file cannot be imported by its name

    def installed(**selected):
        return EntryPoints([entry]).select(**selected)

    monkeypatch.setattr(methods, "entry_points", installed)
    check_method("repeat")
    assert find("repeat") is METHOD
    with pytest.raises(InvalidRequest, match="repeat, none"):
        check_method("telepathy")


def test_every_built_in_method_is_found():
    assert all(isinstance(find(name), Method) for name in METHODS)
    assert find("none") is None
