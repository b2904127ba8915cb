"""Progress without a terminal, and lines of the log and of standard error, which only a terminal folds."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.cli import theme
from foretoken.cli.serve_output import announce, start_log
from foretoken.cli.theme import ColorMode, compilation_announced, console, staged, waiting, wide_console
from foretoken.core.native.compilation import COMPILING, NOTICE, Compilation


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> Compilation:
    """The progress of a process that has compiled nothing."""
    fresh = Compilation()
    monkeypatch.setattr(theme, "compilation", fresh)
    return fresh


@pytest.fixture
def log() -> Iterator[None]:
    """Restores the handlers and levels that ``start_log`` changes."""
    root, ours = logging.getLogger(), logging.getLogger("foretoken")
    kept = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level = kept[:2]
    ours.setLevel(kept[2])


def test_every_stage_is_a_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with staged(console(ColorMode.AUTO, stderr=True)) as say:
        for what, share in (("loading", 0.0), ("steps", 0.25), ("steps", 0.5), ("texts [a]", 0.5), ("steps", 0.75)):
            say(what, share)
    assert capsys.readouterr() == ("", "  0%  loading\n 25%  steps\n 50%  texts [a]\n")


@pytest.mark.parametrize("silent, line", [(False, "loading ...\n"), (True, "")])
def test_a_spinner_is_a_line_without_a_terminal(capsys: pytest.CaptureFixture[str], silent: bool, line: str) -> None:
    with waiting(console(ColorMode.AUTO, stderr=True), "loading", silent=silent):
        assert capsys.readouterr() == ("", line)


def test_a_spinner_shows_how_many_kernels_are_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, compilation: Compilation
) -> None:
    shown: list[str] = []
    notes: Any = console(ColorMode.ALWAYS, stderr=True)
    monkeypatch.setattr("foretoken.cli.theme.on_terminal", lambda console: True)
    monkeypatch.setattr("rich.status.Status.update", lambda status, text: shown.append(text))
    with waiting(notes, "loading"):
        compilation.begin(2)
        compilation.finish()
        compilation.finish()
    assert shown == [f"{COMPILING}: 0 of 2 files", f"{COMPILING}: 1 of 2 files", "loading"]


def test_a_command_that_compiles_says_so_once(capsys: pytest.CaptureFixture[str], compilation: Compilation) -> None:
    with compilation_announced():
        compilation.begin(0)
        assert capsys.readouterr().err == ""
        compilation.begin(2)
        compilation.finish()
        compilation.begin(1)
    assert capsys.readouterr() == ("", f"{NOTICE} ...\n")


def test_lines_of_the_log_are_not_folded(
    capsys: pytest.CaptureFixture[str], log: None, compilation: Compilation
) -> None:
    start_log("info", "text")
    with compilation_announced():
        compilation.begin(1)
    logging.getLogger("foretoken.x").info("word " * 60)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("INFO")[1].strip() for line in lines] == [NOTICE, ("word " * 60).strip()]


def test_the_servers_address_is_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    name = "/models/" + "a-long-name" * 9
    settings: Any = SimpleNamespace(model_names=[name], api_keys=(), key_file=None)
    with socket.socket() as listening:
        listening.bind(("0.0.0.0", 0))
        announce(settings, listening, False, "text")
        port = listening.getsockname()[1]
    address, playground, warning = capsys.readouterr().err.splitlines()
    assert address == f"{name} at http://0.0.0.0:{port}/v1"
    assert playground.startswith("playground at") and warning.startswith("warning: anyone who reaches")


def test_other_programs_read_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    wide_console(ColorMode.AUTO).print("word " * 60)
    assert capsys.readouterr().out.count("\n") == 1
