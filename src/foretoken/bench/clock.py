"""Timing of tasks in one run, interleaved so that drift of the machine affects all equally, and of single methods."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any, Self, TypeVar

from foretoken.costs.measured import TimeSpread

Key = TypeVar("Key", bound=Hashable)

QUIET_SECONDS = 0.01  # before each turn: the threads of the task before, those of torch for instance, may still spin


@dataclass(frozen=True)
class TimedTask:
    """A task to time.

    Attributes:
        run: The timed function. If it returns seconds, these count instead of the measured ones.
        reset: Restores the state after a run, untimed.
        burst: Runs per turn, for tasks so short that the previous turn's cache effects would show.
    """

    run: Callable[[], float | None]
    reset: Callable[[], None] = lambda: None
    burst: int = 1

    def seconds(self) -> float:
        """Runs one turn. Returns the mean seconds of a run."""
        total = 0.0
        for _ in range(self.burst):
            started = perf_counter()
            reported = self.run()
            total += perf_counter() - started if reported is None else reported
            self.reset()
        return total / self.burst


def interleaved(
    tasks: Mapping[Key, TimedTask],
    turns: int,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> dict[Key, TimeSpread]:
    """Runs every task once untimed, then ``turns`` times in rotating order. ``track`` wraps the turns for progress."""
    keys = list(tasks)
    seconds: dict[Key, list[float]] = {key: [] for key in keys}
    for key in keys:
        tasks[key].seconds()
    for turn in track(range(turns)):
        for i in range(len(keys)):
            key = keys[(i + turn) % len(keys)]
            sleep(QUIET_SECONDS)
            seconds[key].append(tasks[key].seconds())
    return {key: TimeSpread.of(values) for key, values in seconds.items()}


class Stopwatch:
    """Sums the seconds spent inside methods of objects, while it is open.

    Attributes:
        seconds: Seconds inside all methods.

    Args:
        methods: Objects with a method's name each.
    """

    def __init__(self, methods: Iterable[tuple[Any, str]]) -> None:
        self.seconds, self._methods = 0.0, list(methods)

    def __enter__(self) -> Self:
        for owner, name in self._methods:
            setattr(owner, name, self._timed(getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name in self._methods:
            delattr(owner, name)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += perf_counter() - started

        return measured
