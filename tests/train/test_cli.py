"""The commands, through the command line's own parser."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretoken.cli.main import app
from foretoken.core.errors import InvalidRequest
from foretoken.train import cards

SIZES = [
    *("--hidden", "32", "--intermediate", "48", "--layers", "1"),
    *("--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--no-compile"),
]
RUN = [*SIZES, "--steps", "2", "--batch", "2", "--window", "16"]


def invoke(*args: object) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def use(printed: str) -> list[str]:
    """Runs the command that is printed last, which uses what was trained. Returns its options."""
    program, *words = shlex.split(printed.splitlines()[-1])
    assert program == "foretoken"
    assert json.loads(invoke(*words, "--max-tokens", 4, "--json").stdout)["text"]
    return words[2:]


@pytest.mark.slow
def test_target_draft_card_and_scale_up(texts: Path, tmp_path: Path) -> None:
    target, draft, wide = tmp_path / "t", tmp_path / "d", tmp_path / "w"
    out = json.loads(invoke("train", "target", target, "--corpus", texts, *RUN, "--json").stdout)
    assert out["path"] == str(target)
    assert out["held_out_loss"] > 0
    printed = invoke("train", "draft", draft, target, "--corpus", texts, *RUN).stdout
    assert "overlap" in printed
    assert use(printed) == ["--model", str(target), "--draft-model", str(draft)]
    assert str(draft / "README.md") in invoke("train", "card", target, "--draft", draft, "--corpus", texts).stdout
    assert "--corpus FILES" in (draft / "README.md").read_text()
    sizes = ["--hidden", "64", "--intermediate", "96", "--layers", "2", "--heads", "4", "--kv-heads", "2"]
    assert json.loads(invoke("widen", target, wide, *sizes, "--json").stdout)["parameters"] > 20_000


@pytest.mark.slow
def test_heads_and_their_cards(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "_PROMPTS", 2)
    monkeypatch.setattr(cards, "_TOKENS", 8)
    target, head = tmp_path / "t", tmp_path / "h"
    data = ["--data", texts, "--model", target, "--windows", "4", "--held-out", "2", "--device", "cpu", "--no-compile"]
    invoke("train", "target", target, "--corpus", texts, *RUN, "--layers", "4")
    for role, own in (("eagle3", ("--taps", "1,2,3", "--vocabulary", "64", "--depths", "2")), ("blockwise", ())):
        done = invoke("train", role, head, *data, *own, "--steps", "2", "--batch", "2", "--window", "24")
        assert "length_drawn 1." in done.stdout
        assert use(done.stdout)[-1] == json.dumps({"method": role, "model": str(head)})
        assert str(head / "README.md") in invoke("train", "card", target, "--head", head, "--data", texts).stdout
        card = (head / "README.md").read_text()
        assert f"foretoken train {role} h --model t" in card
        assert "mean acceptance length at temperature 1" in card
        assert ("--speculative-draft-model-path h " in card) == (role == "eagle3") and "    llama.cpp " in card
        assert json.loads((head / "zoo.json").read_text()) == {"name": "h", "role": role}
        shutil.rmtree(head)
    with pytest.raises(InvalidRequest, match="layer numbers"):
        invoke("train", "eagle3", tmp_path / "x", *data, "--taps", "low")
    with pytest.raises(InvalidRequest, match="expected one of eagle3"):
        invoke("train", "card", target, "--head", target, "--data", texts)


def test_invalid_outputs_and_lengths_raise_before_any_work(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    for force in ((), ("--force",)):
        with pytest.raises(InvalidRequest, match="mine holds files that are no checkpoint"):
            invoke("train", "target", tmp_path / "mine", *RUN, "--data", texts, *force)
    with pytest.raises(InvalidRequest, match="choose one"):
        invoke("train", "target", tmp_path / "t", "--steps", 2, "--minutes", 1)
    with pytest.raises(InvalidRequest, match="same folder"):
        invoke("widen", tmp_path / "t", tmp_path / "t")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["mine", "texts"]
