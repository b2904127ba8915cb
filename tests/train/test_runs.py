from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.core.artifacts import MODEL
from foretoken.core.errors import InvalidRequest
from foretoken.train.config import RunOptions
from foretoken.train.runs import TrainingRun


def test_an_interrupted_run_is_not_started_over_by_accident(tmp_path: Path) -> None:
    checkpoint = tmp_path / "out.checkpoint"
    checkpoint.write_text("x")
    with pytest.raises(InvalidRequest, match="--resume"):
        TrainingRun(RunOptions(tmp_path / "out", resume=False, force=False), MODEL)
    TrainingRun(RunOptions(tmp_path / "out", resume=True, force=False), MODEL)
    assert checkpoint.exists()
    TrainingRun(RunOptions(tmp_path / "out", resume=False, force=True), MODEL)
    assert not checkpoint.exists()


@pytest.mark.parametrize("ending", ["lessons", "distributions", "checkpoint"])
@pytest.mark.parametrize("resume", [False, True])
def test_folders_beside_the_output_that_no_run_wrote_are_kept(tmp_path: Path, ending: str, resume: bool) -> None:
    """They would be deleted before the run or after it."""
    beside = tmp_path / f"out.{ending}"
    beside.mkdir()
    (beside / "notes.txt").write_text("x")
    with pytest.raises(InvalidRequest, match=f"out.{ending} holds files"):
        TrainingRun(RunOptions(tmp_path / "out", resume=resume, force=True), MODEL)
    assert (beside / "notes.txt").read_text() == "x"


def test_an_input_is_not_deleted_as_a_folder_beside_the_output(tmp_path: Path) -> None:
    lessons = tmp_path / "out.lessons"
    lessons.mkdir()
    (lessons / "windows.pt").write_text("x")
    with pytest.raises(InvalidRequest, match="uses"):
        TrainingRun(RunOptions(tmp_path / "out", force=True), MODEL, [lessons / "windows.pt"])
    TrainingRun(RunOptions(tmp_path / "out", force=True), MODEL)
