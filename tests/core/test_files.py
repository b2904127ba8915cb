"""A file that is written atomically is there whole, or as it was before."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.core.files import atomic_file


def write(out: Path, text: str, error: BaseException | None = None) -> None:
    with atomic_file(out) as partial:
        partial.write_text(text)
        if error is not None:
            raise error


def test_a_file_appears_whole_and_replaces_the_earlier_one(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    write(tmp_path / "out", "new")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "new"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_earlier_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    write(tmp_path / "out", "old")
    with pytest.raises(type(error)):
        write(tmp_path / "out", "half", error)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "old"
