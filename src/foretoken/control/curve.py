"""Measured seconds by size: of a pass by its rows, of drafting by its depth. Jagged curves are kept as they are."""

from __future__ import annotations

from typing import Any

import numpy as np

_MEMORY = 24.0  # observations of a size that count; older ones fade
_TRUSTED = 4.0  # observations in all after which a passing disturbance can be told
_CLIP = 1.5  # times what is expected; what takes longer counts as this much, and what was known for less
_MOVED = 0.005  # of a mean: a change that is worth another table
_ROW = 0.03  # what one more costs, as a share of the smallest that was measured, while only one size was

Array = np.ndarray[Any, np.dtype[np.float64]]


class Curve:
    """Mean seconds of every size that was measured; between two of them a line, beyond the slope of all.

    origin: size 0 takes no time, so that one measured size is enough for a slope. Below the smallest measured size
    nothing takes less than its share, since a row more makes none of the others dearer.
    """

    def __init__(self, *, origin: bool = False) -> None:
        self._origin = origin
        self._points: dict[int, tuple[float, float]] = {}  # by size: mean seconds, weight
        self._table: Array = np.zeros(0)  # by size, as far as anybody asked

    @property
    def weight(self) -> float:
        """Observations, as far as they count still."""
        return sum(weight for _, weight in self._points.values())

    def add(self, size: int, seconds: float) -> None:
        """One more observation."""
        mean, weight = self._points.get(size, (0.0, 0.0))
        weight = min(weight, _MEMORY - 1.0)
        most = _CLIP * self.at(size) if self.weight >= _TRUSTED else seconds
        if seconds > most:
            seconds, weight = most, weight / 2
        mean = (mean * weight + seconds) / (weight + 1.0)
        known = size in self._points and size < len(self._table)
        if not known or abs(mean - self._table[size]) > _MOVED * mean:
            self._table = np.zeros(0)
        self._points[size] = mean, weight + 1.0

    def put(self, size: int, seconds: float) -> None:
        """What ``size`` takes, instead of what was known of it."""
        self._points[size] = seconds, max(1.0, self.known(size))
        self._table = np.zeros(0)

    def doubt(self, weight: float) -> None:
        """What is known counts as ``weight`` observations of each size, at most: it was measured elsewhere."""
        self._points = {size: (mean, min(weight, old)) for size, (mean, old) in self._points.items()}

    def known(self, size: int, slack: int = 0) -> float:
        """The weight of what was measured within ``slack`` of ``size``."""
        return sum(weight for at, (_, weight) in self._points.items() if abs(at - size) <= slack)

    def at(self, size: float) -> float:
        """Seconds; 0 of nothing measured."""
        if size in self._points:
            return self._points[int(size)][0]
        return float(self.over(np.asarray([size]))[0])

    def over(self, sizes: Array) -> Array:
        """Seconds for each of ``sizes``, whole or not."""
        most = int(np.max(sizes, initial=0)) + 2
        if len(self._table) < most:
            self._table = self._values(max(most, 64))
        return np.interp(sizes, np.arange(len(self._table)), self._table)

    def below(self, size: int) -> float:
        """Seconds of the largest size under ``size`` that was measured; 0 where none was."""
        smaller = [known for known in self._points if known < size]
        return self._points[max(smaller)][0] if smaller else 0.0

    def least(self, sizes: Array) -> Array:
        """Seconds for each of ``sizes`` if what was not measured took no more than the largest below it that was."""
        known = np.array(sorted(self._points), dtype=np.float64)
        if not len(known):
            return np.zeros(len(sizes))
        seconds = np.array([self._points[int(size)][0] for size in known])
        found: Array = np.minimum(self.over(sizes), seconds[np.maximum(np.searchsorted(known, sizes, "right") - 1, 0)])
        return found

    def _values(self, count: int) -> Array:
        """[count], of sizes 0, 1, ..."""
        if not self._points:
            return np.zeros(count)
        sizes = np.array(sorted(self._points), dtype=np.float64)
        seconds = np.array([self._points[int(size)][0] for size in sizes])
        if self._origin:
            sizes, seconds = np.append(0.0, sizes), np.append(0.0, seconds)
        if len(sizes) > 1:
            slope = max(0.0, (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]))
        else:
            slope = _ROW * seconds[0] / (1.0 + _ROW * (sizes[0] - 1.0))
        wanted = np.arange(count, dtype=np.float64)
        found = np.interp(wanted, sizes, seconds)
        found += slope * np.maximum(0.0, wanted - sizes[-1])
        if not self._origin:
            below = wanted < sizes[0]
            share = seconds[0] * wanted / sizes[0]
            found[below] = np.maximum(found - slope * (sizes[0] - wanted), share)[below]
        return found
