from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken import zoo
from foretoken.core.errors import InvalidRequest
from foretoken.train.widen import checkpoint as up
from foretoken.train.widen import llama
from foretoken.train.widen.checkpoint import scaled


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
