"""A file or folder that is written atomically is there whole, or as it was before."""

import os
from pathlib import Path

import pytest

from foretoken.core.errors import InvalidRequest, WriteError
from foretoken.core.files import atomic_directory, atomic_file


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


@pytest.mark.parametrize("before, written", [(0o600, 0o644), (0o644, 0o600)])
def test_a_file_that_replaces_another_grants_no_more_access(tmp_path: Path, before: int, written: int) -> None:
    write(tmp_path / "out", "old")
    (tmp_path / "out").chmod(before)
    with atomic_file(tmp_path / "out") as partial:
        partial.write_text("new")
        partial.chmod(written)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600


def fill(out: Path, text: str = "new") -> None:
    with atomic_directory(out) as folder:
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
        with atomic_directory(tmp_path / "out") as folder:
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


def refuse(existing: Path) -> None:
    raise InvalidRequest(f"{existing.name} stays")


def test_a_folder_that_appeared_since_the_check_is_kept(tmp_path: Path) -> None:
    def late() -> None:
        with atomic_directory(tmp_path / "out", refuse) as folder:
            (folder / "provenance.json").write_text("new")
            fill(tmp_path / "out", "of another process")

    with pytest.raises(InvalidRequest, match="out stays"):
        late()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "provenance.json").read_text() == "of another process"


def test_a_folder_that_was_exchanged_since_the_check_is_put_back(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    checks: list[str] = []

    def second_refuses(existing: Path) -> None:
        checks.append(existing.name)
        if len(checks) == 2:
            raise InvalidRequest("no")

    def late() -> None:
        with atomic_directory(tmp_path / "out", second_refuses) as folder:
            (folder / "provenance.json").write_text("new")

    with pytest.raises(InvalidRequest, match="no"):
        late()
    assert names(tmp_path) == ["out"] and checks[0] == "out" and checks[1].startswith(".out.old-")
    assert (tmp_path / "out" / "provenance.json").read_text() == "old"


def test_two_writers_of_one_folder_keep_apart(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out") as first, atomic_directory(tmp_path / "out") as second:
        (first / "a").write_text("1")
        (second / "b").write_text("2")
        assert names(first) == ["a"] and names(second) == ["b"]
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["a"]


def test_a_process_that_was_killed_during_the_exchange_loses_nothing(tmp_path, monkeypatch):
    fill(tmp_path / "out", "old")
    real, moves = os.replace, []

    def killed(source: Path, target: Path) -> None:
        real(source, target)
        moves.append(target)
        monkeypatch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), 9))

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "replace", killed)
        fill(tmp_path / "out")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert not (tmp_path / "out").exists()
    with pytest.raises(InvalidRequest, match="out stays"), atomic_directory(tmp_path / "out", refuse):
        pass
    assert (tmp_path / "out" / "provenance.json").read_text() == "old"
