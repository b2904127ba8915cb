"""Methods from outside the package: registered in the process, or found as entry points of installed packages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from foretoken import LLM, SamplingParams, SpeculativeConfig
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.propose import methods
from foretoken.propose.base import Method, Proposer
from foretoken.propose.methods import ENTRY_POINTS, METHODS, check_method, find, register
from foretoken.speculation import with_draft


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
