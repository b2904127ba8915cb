"""Axes of charts: scales, ticks, grid lines. Coordinates are in the units of the drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from foretoken.report.markup import Html, element, join

WIDTH, HEIGHT = 480.0, 300.0  # small enough that text stays legible on a phone
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 28.0, 46.0
TICKS = 7


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis.

    Args:
        label: Quantity and unit.
        zero: Whether the axis includes 0.
        log: Logarithmic scale, for positive values.
        at: Positions of the ticks, empty for automatic ones.
        low: A value that is shown whatever the data.
        high: Another.
    """

    label: str
    zero: bool = False
    log: bool = False
    at: tuple[float, ...] = ()
    low: float | None = None
    high: float | None = None

    def shows(self, value: float) -> bool:
        """Whether the axis can show a value."""
        return math.isfinite(value) and (value > 0 or not self.log)


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps ``low``..``high`` to ``start``..``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def clamped(self, value: float) -> float:
        """As ``__call__``, clamped to the ends."""
        return self(min(max(value, self.low), self.high))


@dataclass(frozen=True, slots=True)
class Axes:
    """Two scales, and their axes as SVG."""

    x: AxisScale
    y: AxisScale
    shapes: Html


def ticks(low: float, high: float) -> list[float]:
    """Returns about ``TICKS`` ticks from ``low`` to ``high``, at multiples of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def scale(axis: Axis, values: Iterable[float], start: float, end: float) -> tuple[AxisScale, list[float]]:
    """Returns a scale that shows all finite ``values``, and its ticks."""
    extra = [v for v in (axis.low, axis.high, *axis.at) if v is not None]
    shown = [v for v in (*values, *extra) if axis.shows(v)] or [1.0]
    low, high = min(shown), max(shown)
    if axis.log:
        if high <= low:
            low, high = low / 2, high * 2
        at = list(axis.at) or _powers(low, high)
        return AxisScale(low, high, start, end, log=True), at
    if axis.zero:
        low, high = min(0.0, low), max(0.0, high)
    if high <= low:
        low, high = low - (0.5 * abs(low) or 0.5), high + (0.5 * abs(high) or 0.5)
    at = list(axis.at)
    if not at:
        at = ticks(low, high)
        step = at[1] - at[0] if len(at) > 1 else high - low
        high = max(high, math.ceil(high / step - 1e-9) * step)
        low = min(low, math.floor(low / step + 1e-9) * step)
        at = ticks(low, high)
    return AxisScale(low, high, start, end), at


def frame(x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float], height: float = HEIGHT) -> Axes:
    """Returns axes with grid lines, ticks and labels for the data."""
    across, at_x = scale(x, xs, LEFT, WIDTH - RIGHT)
    up, at_y = scale(y, ys, height - BOTTOM, TOP)
    floor, right = height - BOTTOM, WIDTH - RIGHT
    shapes = [element("text", y.label, x=0, y=11.0, class_="dim")]
    for value in at_y:
        shapes.append(element("line", x1=LEFT, y1=up(value), x2=right, y2=up(value), class_="grid-line"))
        shapes.append(
            element("text", tick(value, at_y), x=LEFT - 6, y=up(value) + 4.5, text_anchor="end", class_="dim")
        )
    shapes.append(element("line", x1=LEFT, y1=floor, x2=right, y2=floor, class_="axis"))
    for value in at_x:
        shapes.append(element("line", x1=across(value), y1=floor, x2=across(value), y2=floor + 4, class_="axis"))
        shapes.append(
            element("text", tick(value, at_x), x=across(value), y=floor + 18, text_anchor="middle", class_="dim")
        )
    shapes.append(element("text", x.label, x=(LEFT + right) / 2, y=height - 6, text_anchor="middle", class_="dim"))
    return Axes(across, up, join(*shapes))


def tick(value: float, among: Sequence[float]) -> str:
    """Returns a tick's label, with enough decimals to tell it from its neighbours."""
    gaps = [b - a for a, b in pairwise(among) if b > a]
    step = min(gaps, default=abs(value) or 1.0)
    if all(v == round(v) for v in among):
        return f"{value:,.0f}"
    return f"{value:.{max(0, min(6, -math.floor(math.log10(step) + 1e-9)))}f}"


def _powers(low: float, high: float) -> list[float]:
    """Returns powers of two inside, thinned to five or six."""
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    stride = max(1, (last - first) // 5)
    return [2.0**i for i in range(first, last + 1, stride)] or [low]
