"""Commands whose options are dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

from foretoken.cli.grouped import grouped


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A group in a group."""

    depth: Annotated[int, typer.Option(min=1)] = 4


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A group."""

    name: Annotated[str, typer.Option("--called")]
    inner: Inner
    words: list[str] | None = None


def runner(seen: list[object]) -> typer.Typer:
    app = typer.Typer(add_completion=False)

    @app.command()
    @grouped
    def command(source: str, first: bool = False, *, group: Outer, last: float = 0.5) -> None:
        """What it does."""
        seen.append((source, first, group, last))

    return app


def test_options_of_a_command_are_the_fields_in_order() -> None:
    command = typer.main.get_command(runner([]))
    assert [each.name for each in command.params] == ["source", "first", "name", "depth", "words", "last"]
    assert command.help == "What it does."


def test_a_command_gets_its_groups() -> None:
    seen: list[object] = []
    arguments = ["here", "--called", "x", "--words", "a", "--words", "b", "--depth", "2", "--last", "1"]
    runner(seen)(arguments, standalone_mode=False)
    assert seen == [("here", False, Outer(name="x", inner=Inner(depth=2), words=["a", "b"]), 1.0)]


@pytest.mark.parametrize("arguments", [["here"], ["here", "--called", "x", "--depth", "0"]])
def test_bounds_and_missing_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        runner([])(arguments)
