from __future__ import annotations

import os
from pathlib import Path

import pytest

from foretoken.core.errors import InvalidRequest, WriteError
from foretoken.train import files


def fill(out: Path, text: str = "new") -> None:
    with files.atomic_directory(out) as folder:
        (folder / "provenance.json").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


def test_a_folder_appears_whole_and_replaces_the_earlier_one(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    (tmp_path / "out" / "leftover").write_text("x")
    fill(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["provenance.json"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("x")])
def test_a_failure_leaves_the_earlier_folder_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    fill(tmp_path / "out", "old")
    expected = WriteError if isinstance(error, OSError) else type(error)

    def fail() -> None:
        with files.atomic_directory(tmp_path / "out") as folder:
            (folder / "half").write_text("x")
            raise error

    with pytest.raises(expected):
        fail()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "provenance.json").read_text() == "old"


def test_a_failed_exchange_puts_the_earlier_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "out", "old")
    real = os.replace

    def refuse(source: Path, target: Path) -> None:
        if ".partial" in source.name:
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WriteError, match="cannot write"):
        fill(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "provenance.json").read_text() == "old"


def test_an_output_that_is_not_ours_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequest, match="is a file"):
        files.check_output(tmp_path / "file", force=True)
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    assert files.check_output(thesis) == thesis  # an empty folder is nobody's
    (thesis / "chapter.md").write_text("x")
    with pytest.raises(InvalidRequest, match="--force"):
        files.check_output(thesis)
    assert files.check_output(thesis, force=True) == thesis
    fill(tmp_path / "out")
    assert files.check_output(tmp_path / "out") == tmp_path / "out"


def test_an_interrupted_run_is_not_started_over_by_accident(tmp_path: Path) -> None:
    checkpoint = files.checkpoint_of(tmp_path / "out")
    checkpoint.write_text("x")
    with pytest.raises(InvalidRequest, match="--resume"):
        files.check_run(tmp_path / "out", resume=False, force=False)
    files.check_run(tmp_path / "out", resume=True, force=False)
    assert checkpoint.exists()
    files.check_run(tmp_path / "out", resume=False, force=True)
    assert not checkpoint.exists()
