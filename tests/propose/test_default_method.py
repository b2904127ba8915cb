"""Which method drafts where none is named: that of the heads, or of a draft model, or what the target ships."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.models.heads import tiny

from foretoken import LLM, SamplingParams, SpeculativeConfig, zoo
from foretoken.core.errors import InvalidRequest
from foretoken.costs.model import CostModel
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
def test_the_default_does_not_depend_on_the_time_of_a_pass(
    seconds: float, tiny_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_heads_in_the_targets_folder_draft_unless_they_do_not_fit(
    tiny_pair: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    for file in tiny_pair.target.iterdir():
        (folder / file.name).symlink_to(file)
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
