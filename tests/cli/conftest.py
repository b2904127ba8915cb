"""The command line in this process: arguments in; exit code, standard output and error out."""

import io
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest
import typer.main

from foretoken.cli.main import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def ok(self) -> Self:
        """Returns the result, of a command that must succeed."""
        assert self.code == 0, self.err
        return self

    def refused(self, words: str) -> Self:
        """Returns the result, of a command that must fail with these words and print no result."""
        assert (self.code, self.out) == (1, "") and words in self.err, self.err
        return self


Run = Callable[..., Result]
parser = cache(typer.main.get_command)  # building the parsers of all commands takes 15 ms


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("generate --json", "a text")``: a command line, and further arguments. ``stdin=`` is what ``-`` reads."""

    monkeypatch.setattr(typer.main, "get_command", parser)

    def call(command: str = "", *args: str, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit_:
            main([*shlex.split(command), *args])
        out, err = capsys.readouterr()
        return Result(int(exit_.value.code or 0), out, err)

    return call


@pytest.fixture
def pair(tiny_pair: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny pair in the place of the bundled one."""
    monkeypatch.setattr("foretoken.zoo.path", lambda role: getattr(tiny_pair, role))
    return tiny_pair


def prompts_file(folder: Path, prompts: Sequence[str]) -> Path:
    """Writes prompts as the commands read them."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return file
