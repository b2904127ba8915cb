"""Seconds of a pass by concurrency and draft length: measured, or predicted with an interval of the unknown part.

A pass of c sequences with d draft tokens each verifies c (d + 1) rows, as a plain pass of that many sequences computes.
The time of a speculative pass beyond that is overhead: one component for every draft token (the draft model's passes)
and one that does not depend on their number. Two measured draft lengths separate the two. From one, the fixed component
is taken to be a quarter of the overhead, and the interval holds everything from none to half of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from foretoken.plan.statistics import ratio_interval, student_quantile
from foretoken.probe.waves import Wave

LEVEL = 0.95
_FIXED = (0.25, 0.0, 0.5)  # fraction of the overhead that does not depend on the draft length: assumed, least, most
_MODEL = 0.03  # relative error of a line between two measured points
_BEYOND = 0.1  # relative error of one beyond them, for each multiple of the last point


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of a pass. width: half the relative width of their interval. tokens: of a sequence, if measured."""

    seconds: float
    width: float
    tokens: float | None = None


def measured_plain(waves: Sequence[Wave]) -> PassSeconds | None:
    """Returns the seconds of a plain pass in some waves of one size, None if fewer than two of them were full."""
    seconds = [each for wave in waves if (each := _seconds(wave, passes=False))]
    return PassSeconds(*_middle(seconds), 1.0) if len(seconds) > 1 else None


def measured_speculative(
    waves: Sequence[Wave],
    beside: Sequence[Wave],
    plain: PassSeconds,
    tokens_per_pass: float,
    bursts: float | None,
) -> PassSeconds | None:
    """Returns the seconds of a speculative pass in some waves of one size, None if fewer than two of them were full.

    A wave is compared with the plain one of its round, which was sent next to it, so that a slow machine slows both.

    Args:
        waves: The waves.
        beside: The plain waves of the same rounds.
        plain: The seconds of their passes.
        tokens_per_pass: Tokens of a sequence in a speculative pass.
        bursts: Bursts of such a pass, 1 unless some hold two; None if bursts are no passes. The seconds of a pass need
            few texts, those of a token vary with the number of accepted tokens.
    """
    full = [wave.streams for wave in waves if wave.streams]
    if len(full) < 2:
        return None
    if bursts is None:
        seconds = [sum(stream.seconds for stream in streams) for streams in full]
        tokens = [sum(stream.tokens for stream in streams) for streams in full]
        mean, low, high = ratio_interval(seconds, tokens, LEVEL)
        return PassSeconds(mean * tokens_per_pass, (high - low) / 2 / mean, tokens_per_pass)
    pairs = [(_seconds(a, passes=True), _seconds(b, passes=False)) for a, b in zip(waves, beside, strict=True)]
    ratios = [a / b for a, b in pairs if a and b]
    if len(ratios) < 2:
        return None
    middle, width = _middle(ratios)
    return PassSeconds(plain.seconds * middle * bursts, width, tokens_per_pass)


def _seconds(wave: Wave, passes: bool) -> float:
    """Returns the seconds of a burst or of a token in a wave, 0 if it was not full."""
    count = sum(stream.passes if passes else stream.tokens for stream in wave.streams)
    return sum(stream.seconds for stream in wave.streams) / count if count else 0.0


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of the middle half, which a few disturbed waves do not move, and half its relative interval.

    Its standard error is 1.09 times that of the mean of normal values, whose deviation is 1.48 times the median one,
    corrected for few values.
    """
    count, middle = len(values), median(values)
    kept = sorted(values)[count // 4 : count - count // 4]
    deviation = 1.4826 * median(abs(value - middle) for value in values) * count / (count - 0.8)
    width = student_quantile(0.5 + LEVEL / 2, count - 1) * 1.09 * deviation / math.sqrt(count)
    return sum(kept) / len(kept), width / middle


@dataclass(frozen=True)
class SpeedModel:
    """Seconds of passes. plain: by concurrency. speculative: by draft length and concurrency."""

    plain: Mapping[int, PassSeconds]
    speculative: Mapping[tuple[int, int], PassSeconds]

    @property
    def depths(self) -> list[int]:
        """Draft lengths that were measured."""
        return sorted({depth for depth, _ in self.speculative})

    def plain_pass(self, concurrency: float) -> PassSeconds:
        """Returns the seconds of a plain pass of ``concurrency`` sequences."""
        return _along(self.plain, concurrency)

    def pass_with(self, depth: int, concurrency: int) -> PassSeconds:
        """Returns the seconds of a pass with ``depth`` draft tokens for each of ``concurrency`` sequences."""
        if (measured := self.speculative.get((depth, concurrency))) is not None:
            return measured
        ends = self._ends(concurrency)
        if depth in ends:
            return ends[depth]
        if len(ends) > 1:
            return _along(ends, depth)
        ((measured_depth, end),) = ends.items()
        values = [self._with_fixed(depth, concurrency, measured_depth, end, fraction) for fraction in _FIXED]
        off = max(abs(math.log(value / values[0])) for value in values[1:])
        rows = concurrency * (max(depth, measured_depth) + 1)
        beyond = _BEYOND * max(0.0, math.log(rows / max(self.plain))) if depth > measured_depth else 0.0
        return PassSeconds(values[0], off + math.hypot(end.width, _MODEL, beyond))  # a bound adds to random errors

    def free_pass(self, rows: float, concurrency: int) -> PassSeconds:
        """Returns the seconds of a pass over ``rows`` rows whose drafts cost nothing but the fixed overhead."""
        base = self.plain_pass(rows)
        fixed = [self._fixed(concurrency, fraction) for fraction in _FIXED]
        seconds = [max(base.seconds, self.plain_pass(concurrency).seconds) + each for each in fixed]
        off = max(abs(math.log(value / seconds[0])) for value in seconds[1:])
        return PassSeconds(seconds[0], math.hypot(base.width, off, _MODEL))

    def _ends(self, concurrency: int) -> dict[int, PassSeconds]:
        """Returns the seconds at each draft length that was measured."""
        columns = {
            depth: {number: value for (at, number), value in self.speculative.items() if at == depth}
            for depth in self.depths
        }
        return {depth: _along(column, concurrency) for depth, column in columns.items()}

    def _overhead(self, depth: int, concurrency: int, seconds: float) -> float:
        return seconds - self.plain_pass(concurrency * (depth + 1)).seconds

    def _with_fixed(self, depth: int, concurrency: int, measured: int, end: PassSeconds, fixed: float) -> float:
        """Returns the seconds at a draft length other than ``measured`` for a fixed fraction of the overhead."""
        overhead, plain = self._overhead(measured, concurrency, end.seconds), self.plain_pass(concurrency).seconds
        scale = fixed + (1.0 - fixed) * depth / measured
        if overhead < 0.0:  # sequences cost more than rows do, so the cost of more rows is unknown
            rest = end.seconds - plain
            return max(plain * 0.5, plain + max(0.0, rest) * scale + min(0.0, rest))
        return max(self.plain_pass(concurrency * (depth + 1)).seconds, plain) + overhead * scale

    def _fixed(self, concurrency: int, fraction: float) -> float:
        """Returns the overhead of speculation that does not depend on the draft length."""
        ends = self._ends(concurrency)
        if len(ends) > 1:
            start = _along(ends, 0).seconds - self.plain_pass(concurrency).seconds
            return max(0.0, start) * (0.5 + 2.0 * fraction)  # the line's intercept, give or take half of it
        ((depth, end),) = ends.items()
        return fraction * max(0.0, self._overhead(depth, concurrency, end.seconds))


def _along(points: Mapping[int, PassSeconds], at: float) -> PassSeconds:
    """Returns the value on the line between the nearest two points, or beyond the last two."""
    if at == int(at) and (measured := points.get(int(at))) is not None:
        return measured
    places = sorted(points)
    if len(places) == 1:
        only = points[places[0]]
        return PassSeconds(only.seconds, math.hypot(only.width, _BEYOND * abs(math.log(max(at, 0.5) / places[0]))))
    high = max(1, next((i for i, place in enumerate(places) if place > at), len(places) - 1))
    a, b = places[high - 1], places[high]
    share = (at - a) / (b - a)
    seconds = (1 - share) * points[a].seconds + share * points[b].seconds
    width = max(points[a].width, points[b].width)
    inside = 0.0 <= share <= 1.0
    far = 0.0 if inside else _BEYOND * (math.log(at / b) if share > 1.0 else (a - at) / a)
    lowest = 0.5 * min(points[a].seconds, points[b].seconds)
    return PassSeconds(max(seconds, lowest), math.hypot(width, _MODEL, far))
