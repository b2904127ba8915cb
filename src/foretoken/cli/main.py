"""The ``foretoken`` command: its subcommands, and its exit codes."""

import io
import math
import os
import sys
from collections.abc import MutableMapping, Sequence
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from foretoken import __version__
from foretoken.cli.audit import audit
from foretoken.cli.bench import app as bench_app
from foretoken.cli.chat import chat
from foretoken.cli.checkpoints import build_datastore, convert, quantize, widen
from foretoken.cli.demo import demo
from foretoken.cli.files import check_output_files
from foretoken.cli.generate import generate
from foretoken.cli.info import drafts, info, zoo
from foretoken.cli.keys import app as keys_app
from foretoken.cli.plan import plan
from foretoken.cli.serve import serve
from foretoken.cli.serve_options import LORA_MODULES, is_adapter
from foretoken.cli.simulate import simulate
from foretoken.cli.theme import compilation_announced
from foretoken.core.errors import ForetokenError, InvalidRequest


class FiniteCommand(TyperCommand):
    """A command that refuses two things before its work begins.

    These are "nan" and "inf", which Python parses as numbers and typer's bounds do not catch, and output files that
    the command reads.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Raises InvalidRequest."""
        try:
            rest: list[str] = super().parse_args(ctx, _repeated(args))
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:  # the parser's error of a missing value has none
                error.ctx = ctx  # type: ignore[attr-defined]
            raise
        for parameter in self.params:
            value = ctx.params.get(parameter.name or "")
            for number in value if isinstance(value, list | tuple) else (value,):
                if isinstance(number, float) and not math.isfinite(number):
                    raise InvalidRequest(f"{parameter.opts[0]} must be a finite number, got {number}")
        check_output_files(ctx.params)
        return rest


class HelpfulGroup(TyperGroup):
    """A group of commands that prints its help if no command is named."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Raises Exit after printing the help."""
        if not args:
            print(ctx.get_help())
            raise typer.Exit()
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class TrainGroup(HelpfulGroup):
    """The group ``train``. Its commands are generated when they are needed, because their options take time to make."""

    @property
    def commands(self) -> MutableMapping[str, Any]:
        return _train_commands()

    @commands.setter
    def commands(self, value: MutableMapping[str, Any]) -> None:
        """Ignores the commands of the empty group that typer makes."""


@cache
def _train_commands() -> MutableMapping[str, Any]:
    from foretoken.cli.train import app as train_app

    _refuse_early(train_app)
    return typer.main.get_group(train_app).commands


def _refuse_early(group: typer.Typer) -> None:
    """Makes all commands of a group ``FiniteCommand``."""
    for registered in group.registered_commands:
        registered.cls = FiniteCommand


def _repeated(args: list[str]) -> list[str]:
    """Returns arguments in which an option of several values is repeated before each, as vLLM's users write it."""
    written: list[str] = []
    option = None
    for arg in args:
        if option is not None and written[-1] != option and is_adapter(arg):
            written.append(option)
        elif arg.startswith("-"):
            option = arg if arg == LORA_MODULES else None
        written.append(arg)
    return written


app = typer.Typer(
    name="foretoken",
    cls=HelpfulGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # of the subcommands, too
)
for _command in (generate, chat, serve, demo, drafts, plan, simulate, audit, zoo, info, widen, quantize, convert):
    app.command()(_command)
app.command("build-datastore")(build_datastore)
app.add_typer(
    typer.Typer(), name="train", cls=TrainGroup, help="Train a target, distil a draft from it, write their cards."
)
app.add_typer(bench_app, name="bench", cls=HelpfulGroup)
app.add_typer(keys_app, name="keys", cls=HelpfulGroup)
for group in (app, bench_app, keys_app):
    _refuse_early(group)

INTERRUPTED, BROKEN_PIPE, USAGE = 130, 141, 2  # 128 + the signal's number, as shells report it


def _version(requested: bool) -> None:
    if requested:
        print(f"foretoken {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exact speculative decoding: faster text with exactly the target model's distribution."""


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 a refused request or error, 2 wrong usage, 130 Ctrl-C.

    With FORETOKEN_DEBUG=1 errors keep their traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model's text must not crash a Latin-1 terminal
    sys.exit(_run(list(sys.argv[1:] if args is None else args)))


def _run(args: list[str]) -> int:
    try:
        with compilation_announced():
            code = app(args=args, prog_name="foretoken", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader ended (``| head``), and flushing at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if os.environ.get("FORETOKEN_DEBUG") == "1":
            raise
        return _report(error)


def _report(error: Exception) -> int:
    if hasattr(error, "format_message"):  # the parser's own errors, whichever parser typer brought
        return _say(_usage_error(error), getattr(error, "exit_code", USAGE))
    if isinstance(error, ForetokenError):
        return _say(str(error), 1)
    return _say(f"unexpected {type(error).__name__}: {error}; FORETOKEN_DEBUG=1 shows where it came from", 1)


def _usage_error(error: Any) -> str:
    """Returns the parser's message, with the option that was probably meant and the command whose help lists them."""
    context, similar = getattr(error, "ctx", None), getattr(error, "possibilities", None) or ()
    # the parser's own message has all similar ones in alphabetical order
    meant = next((option for option in similar if option.startswith("--")), None)
    message = error.format_message() if meant is None else f"{error.message}; did you mean {meant}?"
    message = message.replace("Value error, ", "")  # pydantic's word, by which newer versions of typer parse
    return f"{message} (see {context.command_path if context is not None else 'foretoken'} --help)"


def _say(message: str, code: int) -> int:
    print("foretoken: error: " + " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
