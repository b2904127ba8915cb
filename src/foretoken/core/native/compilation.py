"""Progress of compiling kernels: a line in the log, or a display that a program provides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

COMPILING = "compiling kernels for this processor, once"
NOTICE = f"{COMPILING}; this takes a minute or two"
Watcher = Callable[[int, int], None]
"""Called with the numbers of finished files and of all files."""

_log = logging.getLogger(__name__)


class Compilation:
    """Counts the files that this process compiles. Its first file is logged unless a watcher shows the progress."""

    def __init__(self) -> None:
        self._lock, self._finished, self._files = Lock(), 0, 0
        self._watchers: list[Watcher] = []

    def begin(self, files: int) -> None:
        with self._lock:
            first, self._files = self._files == 0, self._files + files
        if first and not self._watchers:
            _log.info(NOTICE)
        self._report()

    def finish(self) -> None:
        with self._lock:
            self._finished += 1
        self._report()

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Calls ``watcher`` instead of earlier ones whenever a count changes within the ``with`` block."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def _report(self) -> None:
        if self._watchers:
            self._watchers[-1](self._finished, self._files)


compilation = Compilation()
"""The compilation of this process."""
