"""A progress bar of completions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def completion_progress(total: int, show: bool | None) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each finished completion, which advances a progress bar on stderr.

    Args:
        total: Number of completions.
        show: Whether to show the bar. None shows it for several completions on a terminal.
    """
    if not (total > 1 and sys.stderr.isatty() if show is None else show):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("completions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
