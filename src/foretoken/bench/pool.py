"""Loaded systems of a race: all of them while memory suffices, otherwise those that are needed soonest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from foretoken.bench.peers.protocol import Setup
from foretoken.bench.peers.worker import PeerWorker
from foretoken.bench.setting import memory

WEIGHT_COPIES, OVERHEAD = 2.5, 2 * 2**30  # while loading, a system may hold its weights twice; and its libraries


class Pool:
    """Keeps workers loaded while memory suffices.

    Args:
        start: Starts a worker.
        schedule: The setup of every turn. The worker whose next turn is furthest away is unloaded first.
        fits: Whether a setup fits into free memory.
    """

    def __init__(
        self,
        start: Callable[[Setup], PeerWorker],
        schedule: Sequence[Setup],
        fits: Callable[[Setup], bool] = lambda setup: memory("MemAvailable") >= needed(setup),
    ) -> None:
        self._start, self._schedule, self._fits = start, list(schedule), fits
        self._workers: dict[Setup, PeerWorker] = {}

    @property
    def loaded(self) -> int:
        """Number of loaded workers."""
        return len(self._workers)

    def get(self, turn: int) -> PeerWorker:
        """Returns the worker of a turn and loads it if necessary, unloading others. Raises PeerError."""
        setup = self._schedule[turn]
        if setup not in self._workers:
            while self._workers and not self._fits(setup):
                self.drop(max(self._workers, key=lambda other: self._next(other, turn)))
            self._workers[setup] = self._start(setup)
        return self._workers[setup]

    def drop(self, setup: Setup) -> None:
        """Unloads a worker; unknown setups are ignored."""
        if setup in self._workers:
            self._workers.pop(setup).close()

    def close(self) -> None:
        """Unloads all workers."""
        for setup in list(self._workers):
            self.drop(setup)

    def _next(self, setup: Setup, turn: int) -> int:
        """Returns the next turn that needs ``setup``, or the number of turns if none does."""
        return next((at for at in range(turn, len(self._schedule)) if self._schedule[at] == setup), len(self._schedule))


def needed(setup: Setup) -> int:
    """Returns the bytes of memory that must be free before ``setup`` is loaded."""
    target = Path(setup.target)
    files = [target] if target.is_file() else [f for f in target.glob("*") if f.suffix in (".safetensors", ".bin")]
    weights = sum(file.stat().st_size for file in files)
    return int(WEIGHT_COPIES * weights) + OVERHEAD
