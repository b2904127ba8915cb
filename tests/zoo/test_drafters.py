"""The table of published drafters: its format, and the names by which a target is found."""

from __future__ import annotations

from collections import Counter

import pytest

from foretoken import zoo
from foretoken.propose.methods import METHODS
from foretoken.zoo.drafters import BUNDLED, FORMS, drafters, drafters_of, name_key


def test_every_row_has_a_known_form_a_licence_and_a_source() -> None:
    assert len(drafters()) >= 60
    for row in drafters():
        assert row.form in FORMS and all(vars(row).values()), row
        assert row.source == BUNDLED or row.source.startswith("https://"), row
        assert row.bundled or row.target.count("/") == row.name.count("/") == 1, row
    assert set(FORMS.values()) <= set(METHODS)
    assert {row.form for row in drafters()} == set(FORMS)


def test_no_pair_is_listed_twice() -> None:
    pairs = Counter((row.target.lower(), row.name.lower()) for row in drafters())
    assert [pair for pair, count in pairs.items() if count > 1] == []


def test_bundled_rows_name_bundled_models() -> None:
    names = {model.name for model in zoo.list_models()}
    assert {row.name for row in drafters() if row.bundled} <= names
    assert any(row.bundled and row.target == "HuggingFaceTB/SmolLM2-135M-Instruct" for row in drafters())


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-8B",
        "unsloth/Qwen3-8B-GGUF",
        "Qwen3 8B",
        "Qwen3-8B-Q4_K_M",
        "Qwen3-8B.IQ4_XS",
        "/models/qwen3-8b-bf16/",
        "https://huggingface.co/Qwen/Qwen3-8B",
        "Qwen3-8B-GPTQ-Int4",
        "Qwen3-8B-FP8-dynamic",
    ],
)
def test_names_of_one_model_are_equal_whatever_its_storage(name: str) -> None:
    assert name_key(name) == "qwen3-8b"
    assert {row.target for row in drafters_of([name])} == {"Qwen/Qwen3-8B"}


def test_names_of_other_models_differ() -> None:
    names = ["Qwen3-8B", "Qwen3-8B-Base", "Qwen3-0.6B", "Qwen3.5-8B", "Qwen3-8B-Instruct", "gpt-oss-20b"]
    assert len(set(map(name_key, names))) == len(names)
    assert drafters_of(["a/model-of-mine", ""]) == []


def test_drafters_of_the_first_name_come_first_by_acceptance() -> None:
    rows = drafters_of(["Qwen/Qwen3-4B", "Qwen/Qwen3-8B"])
    targets = [row.target for row in rows]
    assert targets == sorted(targets) and len(set(targets)) == 2
    forms = [list(FORMS).index(row.form) for row in rows if row.target == "Qwen/Qwen3-8B"]
    assert forms == sorted(forms) and len(forms) > 5
