"""Measured seconds by size: of a forward pass by its rows, of drafting by its depth."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from foretoken.costs.tuning import TUNING, Tuning

_FAR = 1e6  # sizes beyond the largest known one for which the extrapolation holds


class Curve:
    """Mean seconds of each measured size, linear between them.

    Below the smallest measured size, a size takes at least its proportional share: another row makes no other row more
    expensive.

    Args:
        origin: Size 0 takes no time, so that one measured size gives a slope.
        exact: Every size was measured carefully. A jagged curve is then kept as it is, and the slope of its last two
            sizes continues. Otherwise seconds between sizes never fall, and the slope of the whole curve continues.
        tuning: Constants.

    Attributes:
        weight: Number of observations, as far as they still count.
    """

    def __init__(self, *, origin: bool = False, exact: bool = False, tuning: Tuning = TUNING) -> None:
        self._origin, self._exact, self._tuning = origin, exact, tuning
        self.weight = 0.0
        self._points: dict[int, tuple[float, float]] = {}  # by size: mean seconds, weight in observations
        self._line: tuple[list[float], list[float]] | None = None  # sizes and seconds to interpolate, None: changed

    @staticmethod
    def of(points: Mapping[int, float], *, exact: bool = False) -> "Curve":
        """Returns the curve through seconds by size."""
        curve = Curve(exact=exact)
        for size, seconds in points.items():
            curve.put(size, seconds)
        return curve

    def add(self, size: int, seconds: float) -> None:
        """Records an observation."""
        mean, before = self._points.get(size, (0.0, 0.0))
        weight = min(before, self._tuning.memory_steps - 1.0)
        limit = self._tuning.clip_ratio * self.at(size) if self.weight >= self._tuning.trusted_steps else seconds
        if seconds > limit:
            seconds, weight = limit, weight / 2
        self._points[size] = (mean * weight + seconds) / (weight + 1.0), weight + 1.0
        self.weight += weight + 1.0 - before
        self._line = None

    def put(self, size: int, seconds: float) -> None:
        """Replaces what is known of a size."""
        before = self.weight_of(size)
        self._points[size] = seconds, max(1.0, before)
        self.weight += max(1.0, before) - before
        self._line = None

    def discount(self, weight: float) -> None:
        """Lets earlier observations of a size count as ``weight`` at most."""
        self._points = {size: (mean, min(weight, old)) for size, (mean, old) in self._points.items()}
        self.weight = sum(weight for _, weight in self._points.values())

    def scale(self, factor: float) -> None:
        """Multiplies all seconds by ``factor``."""
        self._points = {size: (factor * mean, weight) for size, (mean, weight) in self._points.items()}
        self._line = None

    def points(self) -> dict[int, float]:
        """Returns the mean seconds of each measured size."""
        return {size: mean for size, (mean, _) in sorted(self._points.items())}

    def weight_of(self, size: int) -> float:
        """Returns the weight of the observations of ``size``."""
        return self._points[size][1] if size in self._points else 0.0

    def weight_near(self, size: int, slack: int = 0) -> float:
        """Returns the weight of the observations within ``slack`` of ``size``."""
        return sum(weight for at, (_, weight) in self._points.items() if abs(at - size) <= slack)

    def at(self, size: float) -> float:
        """Returns the seconds of a size as measured, or else ``between``; 0 if nothing was measured."""
        known = self._points.get(size)  # type: ignore[call-overload]
        return self.between(size) if known is None else known[0]

    def between(self, size: float) -> float:
        """Returns the interpolated seconds of a size, which need not be an integer; 0 if nothing was measured."""
        if not self._points:
            return 0.0
        if self._line is None:
            self._line = self._interpolation()
        sizes, seconds = self._line
        i = bisect_right(sizes, size)
        if not 0 < i < len(sizes):
            return seconds[min(i, len(sizes) - 1)]
        share = (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def below(self, size: int) -> float:
        """Returns the seconds of the largest measured size under ``size``, 0 if there is none."""
        smaller = [known for known in self._points if known < size]
        return self._points[max(smaller)][0] if smaller else 0.0

    def _rising(self, sizes: Sequence[int]) -> list[float]:
        """Returns seconds of ``sizes`` that never fall: neighbours that seem to fall have their common mean.

        A larger size takes no less time, so that it seems to is chance (isotonic regression). Otherwise chance would
        decide what a further row takes where rows take almost nothing.
        """
        pools: list[tuple[float, float, int]] = []  # mean, weight, number of sizes
        for size in sizes:
            (mean, weight), count = self._points[size], 1
            while pools and pools[-1][0] >= mean:
                before, more, smaller = pools.pop()
                mean, weight = (before * more + mean * weight) / (more + weight), more + weight
                count += smaller
            pools.append((mean, weight, count))
        return [mean for mean, _, count in pools for _ in range(count)]

    def _interpolation(self) -> tuple[list[float], list[float]]:
        """Returns the sizes and seconds that ``between`` interpolates."""
        measured = sorted(self._points)
        seconds = [self._points[size][0] for size in measured] if self._exact else self._rising(measured)
        sizes: list[float] = [*measured]
        if self._origin:
            sizes.insert(0, 0.0)
            seconds.insert(0, 0.0)
        first, low, last, high = sizes[0], seconds[0], sizes[-1], seconds[-1]
        if len(sizes) > 1:
            base = -2 if self._exact else 0
            slope = max(0.0, (high - seconds[base]) / (last - sizes[base]))
        else:
            slope = self._tuning.row_share * low / (1.0 + self._tuning.row_share * (first - 1.0))
        if not self._origin:
            sizes.insert(0, 0.0)
            seconds.insert(0, max(0.0, low - slope * first))
        return [*sizes, last + _FAR], [*seconds, high + slope * _FAR]
