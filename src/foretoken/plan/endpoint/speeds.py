"""Seconds of a pass by concurrency and draft length: measured, or predicted with the interval of what is not known.

A pass of c sequences with d draft tokens each verifies c (d + 1) rows, as a plain pass of that many sequences computes.
What a speculative pass takes beyond that is overhead: a part for every draft token (the draft model's passes) and a
part that does not depend on their number. Two measured draft lengths tell the two apart. From one, the fixed part is
taken to be a quarter of the overhead, and the interval holds all from none to half of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from foretoken.plan.endpoint.waves import StreamTimes, Wave
from foretoken.plan.statistics import ratio_interval, student_quantile

LEVEL = 0.95
_FIXED = (0.25, 0.0, 0.5)  # share of the overhead that does not depend on the draft length: taken, least, most
_MODEL = 0.03  # relative error of a line between two measured points
_BEYOND = 0.1  # and of one beyond them, for each time the last point


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of a pass.

    Attributes:
        seconds: The seconds.
        width: Half the relative width of their interval.
        tokens: Tokens of a sequence in such a pass where it was measured, None elsewhere.
    """

    seconds: float
    width: float
    tokens: float | None = None


def measured_plain(waves: Sequence[Wave]) -> PassSeconds | None:
    """Returns the seconds of a plain pass in some waves of one size, None if fewer than two of them were full."""
    each = [seconds for wave in waves if (seconds := _seconds(wave, passes=False))]
    return PassSeconds(*_middle(each), 1.0) if len(each) > 1 else None


def measured_speculative(
    waves: Sequence[Wave],
    beside: Sequence[Wave],
    plain: PassSeconds,
    tokens_per_pass: float,
    bursts: float | None,
) -> PassSeconds | None:
    """Returns the seconds of a speculative pass in some waves of one size, None if fewer than two of them were full.

    A wave is compared with the plain one of its round, which was sent next to it: what slows the machine slows both.

    Args:
        waves: The waves.
        beside: The plain waves of the same rounds.
        plain: The seconds of their passes.
        tokens_per_pass: Tokens of a sequence in a speculative pass.
        bursts: Bursts of such a pass, 1 unless some hold two; None where bursts are no passes. The seconds of a pass
            are known from few texts, those of a token vary with how many are accepted.
    """
    full = [wave.streams for wave in waves if wave.streams]
    if len(full) < 2:
        return None
    if bursts is None:
        seconds, tokens = ([sum(each) for each in column] for column in zip(*map(_columns, full), strict=True))
        mean, low, high = ratio_interval(seconds, tokens, LEVEL)
        return PassSeconds(mean * tokens_per_pass, (high - low) / 2 / mean, tokens_per_pass)
    pairs = [
        (_seconds(wave, passes=True), _seconds(other, passes=False)) for wave, other in zip(waves, beside, strict=True)
    ]
    ratios = [one / other for one, other in pairs if one and other]
    if len(ratios) < 2:
        return None
    middle, width = _middle(ratios)
    return PassSeconds(plain.seconds * middle * bursts, width, tokens_per_pass)


def _columns(streams: Sequence[StreamTimes]) -> tuple[list[float], list[float]]:
    return [stream.seconds for stream in streams], [stream.tokens for stream in streams]


def _seconds(wave: Wave, passes: bool) -> float:
    """Returns the seconds of a burst or of a token in a wave, 0 where it was not full."""
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
    """Seconds of passes.

    Attributes:
        plain: Of plain passes, by concurrency.
        speculative: Of speculative passes, by draft length and concurrency.
    """

    plain: Mapping[int, PassSeconds]
    speculative: Mapping[tuple[int, int], PassSeconds]

    @property
    def depths(self) -> list[int]:
        """Draft lengths that were measured."""
        return sorted({depth for depth, _ in self.speculative})

    def plain_pass(self, concurrency: float) -> PassSeconds:
        """Returns the seconds of a plain pass of so many sequences."""
        return _along(self.plain, concurrency)

    def pass_with(self, depth: int, concurrency: int) -> PassSeconds:
        """Returns the seconds of a pass with ``depth`` draft tokens for each of ``concurrency`` sequences."""
        known = self.speculative.get((depth, concurrency))
        if known is not None:
            return known
        ends = {own: self._measured(own, concurrency) for own in self.depths}
        if depth in ends:
            return ends[depth]
        if len(ends) > 1:
            return _along(ends, depth)
        ((own, end),) = ends.items()
        values = [self._with_fixed(depth, concurrency, own, end, share) for share in _FIXED]
        middle = values[0]
        off = max(abs(math.log(value / middle)) for value in values[1:])
        rows = concurrency * (max(depth, own) + 1)
        beyond = _BEYOND * max(0.0, math.log(rows / max(self.plain))) if depth > own else 0.0
        return PassSeconds(middle, off + math.hypot(end.width, _MODEL, beyond))  # a bound adds to what is random

    def free_pass(self, rows: float, concurrency: int) -> PassSeconds:
        """Returns the seconds of a pass over ``rows`` rows whose drafts cost nothing, but have the fixed overhead."""
        base = self.plain_pass(rows)
        fixed = [self._fixed(concurrency, share) for share in _FIXED]
        seconds = [max(base.seconds, self.plain_pass(concurrency).seconds) + each for each in fixed]
        off = max(abs(math.log(value / seconds[0])) for value in seconds[1:])
        return PassSeconds(seconds[0], math.hypot(base.width, off, _MODEL))

    def _measured(self, depth: int, concurrency: int) -> PassSeconds:
        return _along({own: value for (at, own), value in self.speculative.items() if at == depth}, concurrency)

    def _overhead(self, depth: int, concurrency: int, seconds: float) -> float:
        return seconds - self.plain_pass(concurrency * (depth + 1)).seconds

    def _with_fixed(self, depth: int, concurrency: int, own: int, end: PassSeconds, share: float) -> float:
        """Returns the seconds at another draft length than ``own`` if so much of the overhead is fixed."""
        overhead, plain = self._overhead(own, concurrency, end.seconds), self.plain_pass(concurrency).seconds
        if overhead < 0.0:  # sequences cost more than rows do, so rows beyond the sequences are not known
            rest = end.seconds - plain
            return max(plain * 0.5, plain + max(0.0, rest) * (share + (1.0 - share) * depth / own) + min(0.0, rest))
        rows = self.plain_pass(concurrency * (depth + 1)).seconds
        return max(rows, plain) + overhead * (share + (1.0 - share) * depth / own)

    def _fixed(self, concurrency: int, share: float) -> float:
        """Returns the overhead of speculation that does not depend on the draft length."""
        ends = {own: self._measured(own, concurrency) for own in self.depths}
        if len(ends) > 1:
            start = _along(ends, 0).seconds - self.plain_pass(concurrency).seconds
            return max(0.0, start) * (0.5 + 2.0 * share)  # the line's intercept, give or take half of it
        ((own, end),) = ends.items()
        return share * max(0.0, self._overhead(own, concurrency, end.seconds))


def _along(points: Mapping[int, PassSeconds], at: float) -> PassSeconds:
    """Returns the value on the line between the nearest two points, or beyond the last two."""
    known = points.get(int(at)) if at == int(at) else None
    if known is not None:
        return known
    places = sorted(points)
    if len(places) == 1:
        only = points[places[0]]
        return PassSeconds(only.seconds, math.hypot(only.width, _BEYOND * abs(math.log(max(at, 0.5) / places[0]))))
    high = next((i for i, place in enumerate(places) if place > at), len(places) - 1)
    high = max(1, high)
    a, b = places[high - 1], places[high]
    share = (at - a) / (b - a)
    seconds = (1 - share) * points[a].seconds + share * points[b].seconds
    width = max(points[a].width, points[b].width)
    inside = 0.0 <= share <= 1.0
    far = 0.0 if inside else _BEYOND * (math.log(at / b) if share > 1.0 else (a - at) / a)
    lowest = 0.5 * min(points[a].seconds, points[b].seconds)
    return PassSeconds(max(seconds, lowest), math.hypot(width, _MODEL, far))
