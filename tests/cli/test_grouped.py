"""Commands whose options are the fields of dataclasses."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from foretoken.cli.grouped import grouped
from foretoken.core.checks import named
from foretoken.core.errors import InvalidRequest
from foretoken.train.config import HEAD_CONFIG, DSparkTrainConfig, Eagle3Config, TrainConfig


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
        """Runs the command."""
        seen.append((source, first, group, last))

    return app


def test_options_of_a_command_are_the_fields_in_order() -> None:
    command = typer.main.get_command(runner([]))
    assert [each.name for each in command.params] == ["source", "first", "name", "depth", "words", "last"]
    assert command.help == "Runs the command."


def test_a_command_gets_its_groups() -> None:
    seen: list[object] = []
    arguments = ["here", "--called", "x", "--words", "a", "--words", "b", "--depth", "2", "--last", "1"]
    runner(seen)(arguments, standalone_mode=False)
    assert seen == [("here", False, Outer(name="x", inner=Inner(depth=2), words=["a", "b"]), 1.0)]


@pytest.mark.parametrize("arguments", [["here"], ["here", "--called", "x", "--depth", "0"]])
def test_bounds_and_missing_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        runner([])(arguments)


@dataclass(frozen=True)
class Sizes:
    """Sizes.

    Args:
        hidden_size: Width of the residual stream,
            in dimensions.
        secret: Nothing that users choose.
        quick: Be quick.
    """

    hidden_size: int = field(default=8, metadata={"option": "--hidden"})
    secret: int = field(default=1, metadata={"option": None})
    quick: bool = False


def called(usual: Any, *args: str) -> Any:
    """Returns the settings of a command with these options, or its help."""
    app, passed = typer.Typer(rich_markup_mode=None), list[Any]()

    @app.command()
    @grouped(settings=usual)
    def command(settings: Any) -> None:
        passed.append(settings)

    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "160", "TERM": "dumb"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return passed[0] if passed else " ".join(result.output.split())


def test_options_have_names_defaults_and_help_of_the_fields() -> None:
    text = called(Sizes(16), "--help")
    assert "--hidden" in text and "Width of the residual stream, in dimensions. [default: 16]" in text
    assert "--quick" in text and "secret" not in text
    assert called(Sizes(16)) == Sizes(16)
    assert called(Sizes(16), "--hidden", "4", "--quick") == Sizes(4, quick=True)


def test_options_of_a_base_class_are_inherited_with_their_help() -> None:
    text = called(DSparkTrainConfig(), "--help")
    assert "Rank of the Markov head." in text and "Rows of a block." in text
    assert called(DSparkTrainConfig(), "--taps", "1,3", "--gated") == DSparkTrainConfig(taps=(1, 3), gated=True)
    with pytest.raises(InvalidRequest, match="layer numbers like 2,4,5"):
        called(Eagle3Config(), "--taps", "low")


def test_a_length_in_steps_replaces_the_usual_minutes() -> None:
    config = called(HEAD_CONFIG, "--steps", "5", "--no-compile")
    assert (config.steps, config.minutes, config.compile) == (5, None, False)
    assert called(TrainConfig(), "--minutes", "2").minutes == 2.0
    with pytest.raises(InvalidRequest, match="choose one"):
        called(HEAD_CONFIG, "--steps", "5", "--minutes", "2")


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="depths must be an integer of at least 1"):
        called(Eagle3Config(), "--depths", "0")


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """Settings.

    Args:
        seconds: How long.
    """

    seconds: float = named("--patience", 2.0, min=0)


def test_settings_beside_options_have_their_names_and_limits() -> None:
    seen: list[object] = []
    app = typer.Typer(add_completion=False)

    @app.command()
    @grouped
    def command(inner: Inner, bounded: Bounded) -> None:
        seen.append((inner, bounded))

    app(["--patience", "3", "--depth", "5"], standalone_mode=False)
    app([], standalone_mode=False)
    assert seen == [(Inner(depth=5), Bounded(seconds=3.0)), (Inner(), Bounded())]
    with pytest.raises(SystemExit):
        app(["--patience", "-1"])
