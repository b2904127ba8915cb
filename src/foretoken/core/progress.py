"""Progress on stderr (a bar on a terminal, else a line now and then), and Ctrl-C between steps."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Say = Callable[[str, float], None]
"""Reports progress: the current stage, and the finished fraction of the whole."""

PLAIN_SECONDS = 30.0  # between lines without a terminal


class Reporter:
    """Shows the progress of a long task.

    Args:
        title: Name of the task.
        shown: False shows nothing.
    """

    def __init__(self, title: str, shown: bool = True) -> None:
        self.title, self.shown = title, shown
        self._started = self._printed = time.monotonic()
        self._first: float | None = None  # fraction that was finished before, of a task that is resumed
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            times = (TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            columns = (TextColumn("{task.description}"), BarColumn(), *times, TextColumn("{task.fields[status]}"))
            self._bar = Progress(*columns, console=Console(stderr=True), refresh_per_second=2)
            self._task = self._bar.add_task(title, total=1.0, status="")

    def update(self, fraction: float, status: str = "") -> None:
        """Shows the finished fraction of the work, from 0 to 1."""
        self._first = fraction if self._first is None else self._first
        if self._bar is not None:
            self._bar.update(self._task, completed=fraction, status=status)
        elif time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._printed = time.monotonic()
            minutes, done = (self._printed - self._started) / 60, fraction - self._first
            left = f", {minutes / done * (1 - fraction):.1f} left" if done > 0 else ""
            self.line(f"{self.title} {fraction:4.0%}  {minutes:.1f} min{left}  {status}".rstrip())

    def line(self, text: str) -> None:
        """Prints a permanent line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self.shown:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def __enter__(self) -> "Reporter":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def interruptible(notice: str = "") -> Iterator[Callable[[], bool]]:
    """Within the block, records the first Ctrl-C instead of interrupting a step. Yields a function that returns it.

    A second Ctrl-C raises KeyboardInterrupt. Nothing is recorded outside of the main thread. notice: Printed on stderr
    at the first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    requested = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        if notice:
            sys.stderr.write(f"\n{notice}\n")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: requested
    finally:
        signal.signal(signal.SIGINT, before)
