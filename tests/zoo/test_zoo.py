"""The bundled models, and the table of published drafters: its format, and the names by which a target is found."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from foretoken import zoo
from foretoken.core.errors import InvalidRequest
from foretoken.propose.methods import METHODS
from foretoken.train.widen import checkpoint as up
from foretoken.train.widen import llama
from foretoken.train.widen.checkpoint import scaled
from foretoken.zoo import BUNDLED, FORMS, drafters, drafters_of, name_key


@pytest.fixture
def shelf(tiny_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo of the tiny pair."""
    for name, role, source in (("small", "draft", tiny_pair.draft), ("big", "target", tiny_pair.target)):
        folder = tmp_path / "zoo" / name
        folder.mkdir(parents=True)
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "zoo.json").write_text(json.dumps({"name": name, "role": role}))
    (tmp_path / "zoo" / "big" / "README.md").write_text("# big\n")
    monkeypatch.setattr(zoo, "_HERE", tmp_path / "zoo")
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "zoo"


def test_models_are_listed_target_first(shelf: Path) -> None:
    target, draft = zoo.list_models()
    assert (target.name, target.role, target.path, target.card) == ("big", "target", shelf / "big", "# big\n")
    assert (draft.name, draft.role, draft.card) == ("small", "draft", "")
    assert target.parameters > draft.parameters > 1000
    assert target.size_bytes > 2 * target.parameters


def test_a_model_is_found_by_name_or_role(shelf: Path) -> None:
    assert zoo.path("target") == zoo.path("big") == shelf / "big"
    with pytest.raises(InvalidRequest, match=r"big \(target\), small \(draft\)"):
        zoo.path("medusa")


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FORETOKEN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert zoo.cache_folder() == tmp_path / "foretoken"
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "other"))
    assert zoo.cache_folder() == tmp_path / "other"


def test_a_scaled_model_is_built_once(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(llama.PRESETS, "0.7b", (128, 160, 4))
    first = scaled("0.7b")
    monkeypatch.setattr(up, "widen_checkpoint", lambda *a: pytest.fail("built twice"))
    assert scaled("0.7b") == first
    assert (first / "model.safetensors").exists()
    assert first.is_relative_to(shelf.parent / "cache")


def test_the_listing_command_is_readable_and_machine_readable(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from foretoken.cli.info import zoo as command

    command(as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [(r["name"], r["role"]) for r in rows] == [("big", "target"), ("small", "draft")]
    assert {"size_bytes", "path", "card"} <= set(rows[0])
    command()
    assert "big" in capsys.readouterr().out


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
