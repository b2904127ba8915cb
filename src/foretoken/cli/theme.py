"""Styles of token origins, and consoles."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from foretoken.core.native.build import COMPILING, NOTICE, compilation

if TYPE_CHECKING:
    from rich.console import Console


_UNFOLDED = 10_000  # columns


class ColorMode(StrEnum):
    """``auto`` colours a terminal unless NO_COLOR is set (no-color.org)."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class TokenOrigin(StrEnum):
    """Origin of a piece of text: accepted, rejected, or the target's own."""

    ACCEPTED = "accepted"  # drafted, and accepted by the target
    REJECTED = "rejected"  # drafted, and not part of the text
    TARGET = "target"  # the target's own: a recovered token, a bonus token, or plain decoding


STYLES = {TokenOrigin.ACCEPTED: "green", TokenOrigin.REJECTED: "strike dim", TokenOrigin.TARGET: "bold"}
MARKS = {TokenOrigin.ACCEPTED: ("«", "»"), TokenOrigin.REJECTED: ("~~", "~~"), TokenOrigin.TARGET: ("", "")}


def console(mode: ColorMode, *, stderr: bool = False) -> Console:
    """Returns a console on stdout or stderr. Without colours its ``color_system`` is None."""
    from rich.console import Console

    if mode is ColorMode.ALWAYS:
        return Console(stderr=stderr, force_terminal=True, no_color=False, color_system="standard", highlight=False)
    if mode is ColorMode.NEVER or os.environ.get("NO_COLOR"):
        return Console(stderr=stderr, color_system=None, highlight=False)
    return Console(stderr=stderr, highlight=False)


def wide_console(mode: ColorMode, *, stderr: bool = False) -> Console:
    """Returns a console for tables. Only a terminal folds them, so that other programs read whole lines."""
    made = console(mode, stderr=stderr)
    if not made.is_terminal:
        made.width = _UNFOLDED
    return made


def on_terminal(console: Console) -> bool:
    """Returns whether a person watches, also where ``ColorMode.ALWAYS`` writes a terminal's colours into a file."""
    return console.file.isatty()


def note(console: Console, text: str, style: str = "dim", *, soft_wrap: bool = True) -> None:
    """Prints text in one style, by default in lines that are not folded."""
    console.print(text, style=style, markup=False, soft_wrap=soft_wrap)


def print_parts(console: Console, parts: Iterable[Any]) -> None:
    """Prints tables, and lines that are not folded."""
    for part in parts:
        console.print(part, soft_wrap=not hasattr(part, "columns"))


@contextmanager
def waiting(console: Console, text: str, *, silent: bool = False) -> Iterator[None]:
    """Shows ``text`` beside a spinner, or the progress of compiling kernels.

    silent: Whether nothing is printed without a terminal, instead of a line.
    """
    if not on_terminal(console):
        if not silent:
            _line(console, f"{text} ...")
        yield
        return

    def show(finished: int, files: int) -> None:
        status.update(text if finished == files else f"{COMPILING}: {finished} of {files} files")

    with console.status(text) as status, compilation.watched(show):
        yield


@contextmanager
def compilation_announced() -> Iterator[None]:
    """Prints a line on standard error if kernels are compiled within the block, or logs it if the log is open."""
    announced = False

    def announce(finished: int, files: int) -> None:
        nonlocal announced
        if announced or finished == files:
            return
        announced = True
        log = logging.getLogger("foretoken")
        if log.isEnabledFor(logging.INFO):
            log.info(NOTICE)
        else:
            print(f"{NOTICE} ...", file=sys.stderr)

    with compilation.watched(announce):
        yield


@contextmanager
def staged(console: Console) -> Iterator[Callable[[str, float], None]]:
    """Yields a function that shows the current stage and the finished share: as a bar, without a terminal as lines."""
    if not on_terminal(console):
        stages: set[str] = set()

        def show(what: str, share: float) -> None:
            if what not in stages:
                stages.add(what)
                _line(console, f"{share:4.0%}  {what}")

        yield show
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<20}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
    console.file.flush()
