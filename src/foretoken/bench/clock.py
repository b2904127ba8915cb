"""Several things timed in one run, in turns that each begin with another, so that all see the same machine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Task:
    """run: what is timed; if it returns seconds, those count instead. reset: what puts things back, untimed.

    burst: runs in a turn, for things so short that the turn before would show.
    """

    run: Callable[[], float | None]
    reset: Callable[[], None] = lambda: None
    burst: int = 1

    def seconds(self) -> float:
        """One turn. -> seconds of one run"""
        total = 0.0
        for _ in range(self.burst):
            started = perf_counter()
            told = self.run()
            total += perf_counter() - started if told is None else told
            self.reset()
        return total / self.burst


@dataclass(frozen=True)
class Spread:
    """Seconds of one thing over its turns."""

    median: float
    low: float
    high: float
    turns: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        return Spread(median(seconds), min(seconds), max(seconds), len(seconds))


def interleaved(
    tasks: Mapping[Key, Task],
    turns: int,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> dict[Key, Spread]:
    """Every task once untimed, then ``turns`` times. ``track`` shows how far it is."""
    keys = list(tasks)
    seconds: dict[Key, list[float]] = {key: [] for key in keys}
    for key in keys:
        tasks[key].seconds()
    for turn in track(range(turns)):
        for i in range(len(keys)):
            key = keys[(i + turn) % len(keys)]
            seconds[key].append(tasks[key].seconds())
    return {key: Spread.of(values) for key, values in seconds.items()}
