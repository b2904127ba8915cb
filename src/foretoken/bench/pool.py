"""Loaded systems: all of them while memory lasts, otherwise those that are needed soonest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from foretoken.bench.peers.protocol import Answer, Ask, Setup
from foretoken.bench.setting import memory

WEIGHT_COPIES, OVERHEAD = 2.5, 2 * 2**30  # while it loads a system may hold its weights twice, beside its libraries


class Asked(Protocol):
    """What a race needs of a ``Worker``."""

    version: str

    def ask(self, question: Ask) -> Answer: ...
    def close(self) -> None: ...


class Pool:
    """``start`` makes a worker; ``schedule``, the setup of every turn to come, says who will wait longest."""

    def __init__(
        self,
        start: Callable[[Setup], Asked],
        schedule: Sequence[Setup],
        fits: Callable[[Setup], bool] = lambda setup: memory("MemAvailable") >= needed(setup),
    ) -> None:
        self._start, self._schedule, self._fits = start, list(schedule), fits
        self._workers: dict[Setup, Asked] = {}

    def get(self, turn: int) -> Asked:
        """The worker of that turn, loaded now if it is not; others may have to go. Raises PeerError."""
        setup = self._schedule[turn]
        if setup not in self._workers:
            while self._workers and not self._fits(setup):
                self.drop(max(self._workers, key=lambda other: self._next(other, turn)))
            self._workers[setup] = self._start(setup)
        return self._workers[setup]

    def drop(self, setup: Setup) -> None:
        """Unload it; unknown ones are ignored."""
        if setup in self._workers:
            self._workers.pop(setup).close()

    def close(self) -> None:
        for setup in list(self._workers):
            self.drop(setup)

    def _next(self, setup: Setup, turn: int) -> int:
        """The turn at which it is needed again; one never needed comes after all."""
        return next((at for at in range(turn, len(self._schedule)) if self._schedule[at] == setup), len(self._schedule))

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def needed(setup: Setup) -> int:
    """Bytes of memory to have free before ``setup`` is loaded."""
    weights = sum(f.stat().st_size for f in Path(setup.target).glob("*") if f.suffix in (".safetensors", ".bin"))
    return int(WEIGHT_COPIES * weights) + OVERHEAD
