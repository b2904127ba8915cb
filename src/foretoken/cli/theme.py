"""How origins look, and when colours are used at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


_UNFOLDED = 10_000  # columns


class ColorMode(StrEnum):
    """``auto`` colours a terminal unless NO_COLOR is set (no-color.org)."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class TokenOrigin(StrEnum):
    """Who a piece of text came from."""

    ACCEPTED = "accepted"  # drafted, and accepted by the target
    REJECTED = "rejected"  # drafted, and not part of the text
    TARGET = "target"  # the target's own: a correction, a bonus, or plain decoding


STYLES = {TokenOrigin.ACCEPTED: "green", TokenOrigin.REJECTED: "strike dim", TokenOrigin.TARGET: "bold"}
MARKS = {TokenOrigin.ACCEPTED: ("«", "»"), TokenOrigin.REJECTED: ("~~", "~~"), TokenOrigin.TARGET: ("", "")}


def console(mode: ColorMode, *, stderr: bool = False) -> Console:
    """A console on stdout (or stderr); its ``color_system`` is None where colours are not wanted."""
    from rich.console import Console

    if mode is ColorMode.ALWAYS:
        return Console(stderr=stderr, force_terminal=True, no_color=False, color_system="standard", highlight=False)
    if mode is ColorMode.NEVER or os.environ.get("NO_COLOR"):
        return Console(stderr=stderr, color_system=None, highlight=False)
    return Console(stderr=stderr, highlight=False)


def wide_console(mode: ColorMode, *, stderr: bool = False) -> Console:
    """Returns a console for tables, which are folded in a terminal alone, so that other programs read whole lines."""
    made = console(mode, stderr=stderr)
    if not made.is_terminal:
        made.width = _UNFOLDED
    return made


def waiting(console: Console, text: str) -> AbstractContextManager[Any]:
    """A spinner beside ``text``, only where somebody watches."""
    return console.status(text) if console.file.isatty() else nullcontext()


@contextmanager
def staged(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A bar, only where somebody watches: what is being done, and the share of the whole that is done."""
    if not console.is_terminal:
        yield lambda what, share: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<20}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
