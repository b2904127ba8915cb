"""Tokens per pass and seconds of a pass, from the waves of a server, at any draft length and concurrency.

The server's counts are compared with the bursts in which tokens arrive; a plan needs both to agree. Another draft
length is replayed over the bursts. A pass that accepted n of K draft tokens says that the next n tokens are drafted
well and, if n < K, that the one after them is not. A pass of length d accepts the tokens that are drafted well up to
the first that is not, d at most. The token after a fully accepted draft was not drafted: it counts as drafted well as
often as the tokens before it were at the last position.

A pass of c sequences with d draft tokens each verifies c (d + 1) rows, as a plain pass of that many sequences computes.
The time of a speculative pass beyond that is overhead: one component for every draft token (the draft model's passes)
and one that does not depend on their number. Two measured draft lengths separate the two. From one, the fixed component
is taken to be a quarter of the overhead, and the interval holds everything from none to half of it.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from foretoken.plan.statistics import LEVEL, ratio_interval, root, standard_deviation, student_quantile
from foretoken.probe.answers import DraftCounts, summed
from foretoken.probe.server import CannotTellError
from foretoken.probe.workload import Wave

AGREE = 1.2  # ratio of tokens per pass by metrics and by bursts up to which both agree
_BATCHED = 1.15  # tokens that arrive together without speculation, from which bursts are no passes
_OVERSHOT = 1.1  # ratio of steps to passes that texts cut short explain
_REPEATS = 4  # replays of a text, for the tokens that were not drafted
_LONGER = 1.05  # ratio of a step's draft tokens to the draft length, from which that length is wrong
_SHORTER = 0.7  # ratio below which a server often drafts less
_MERGED = 0.02  # fraction of bursts that may hold several passes
_MIN_REQUESTS = 4  # from which an interval is estimated
_FIXED = (0.25, 0.0, 0.5)  # fraction of the overhead that does not depend on the draft length: assumed, least, most
_MODEL = 0.03  # relative error of a line between two measured points
_BEYOND = 0.1  # relative error of one beyond them, for each multiple of the last point


@dataclass(frozen=True, slots=True)
class TokensPerPass:
    """Tokens per pass. width: half the relative width of its interval for another sample of as many requests."""

    mean: float
    width: float
    drafted: float
    positions: tuple[float, ...] = ()


@dataclass(frozen=True)
class EndpointAcceptance:
    """Acceptance of a server's drafter at one draft length, over some waves."""

    depth: int
    counts: DraftCounts | None  # by the server
    tokens: float  # generated, without the first of each request
    texts: tuple[tuple[float, ...], ...]  # for each request, the tokens of its bursts; none if bursts are no passes
    merged: float = 0.0  # fraction of the bursts without speculation that have more than one token

    @classmethod
    def of(cls, depth: int, plain: Sequence[Wave], waves: Sequence[Wave]) -> "EndpointAcceptance":
        """Returns the acceptance in some waves. plain: waves without speculation, which show if bursts are passes."""
        tokens = float(sum(wave.tokens - len(wave.answers) for wave in waves))
        texts = tuple(stream.bursts for wave in waves for stream in wave.streams)
        streams = [stream for wave in plain for stream in wave.streams]
        sizes = [size for stream in streams for size in stream.bursts]
        one_by_one = bool(sizes) and sum(stream.tokens for stream in streams) / len(sizes) < _BATCHED
        merged = sum(round(size) > 1 for size in sizes) / max(1, len(sizes))
        return cls(depth, summed(wave.counts for wave in waves), tokens, texts if one_by_one else (), merged)

    @property
    def counted(self) -> float | None:
        """Tokens per pass by the server's counts: every pass emits one token besides those that it accepts.

        Tokens that were accepted behind the end of a text are counted but not emitted, so that there are at least as
        many passes as steps with drafts.
        """
        if self.counts is None or self.tokens <= self.counts.accepted:
            return None
        passes, steps = self.tokens - self.counts.accepted, self.counts.steps
        if steps is not None and passes < steps <= _OVERSHOT * passes:
            passes = steps
        return 1.0 + self.counts.accepted / passes

    @property
    def seen(self) -> float | None:
        """Tokens per pass by bursts, None if these are no passes."""
        passes = sum(map(len, self.texts))
        return sum(map(sum, self.texts)) / passes if passes else None

    @property
    def shorter(self) -> float | None:
        """Draft tokens of a step if the server often drafts fewer than its draft length, else None."""
        drafted = self.counts.per_step if self.counts is not None else None
        return drafted if drafted is not None and drafted < _SHORTER * self.depth else None

    @property
    def source(self) -> str:
        """The sources of tokens per pass."""
        sources = (("its counts", self.counted), ("the streams", self.seen))
        return " and ".join(name for name, value in sources if value)

    def check(self) -> None:
        """Raises CannotTellError if the counts are impossible, or contradict the streams."""
        counts, counted, seen = self.counts, self.counted, self.seen
        if counts is not None:
            wrong = counts.contradiction
            if not wrong and counts.accepted >= self.tokens > 0:
                wrong = f"{counts.accepted:,.0f} draft tokens accepted in {self.tokens:,.0f} generated ones"
            if not wrong and counts.drafted and counted is not None and counted > _OVERSHOT * (self.depth + 1):
                wrong = f"{counted:.1f} tokens per pass of {self.depth} draft tokens"
            if wrong:
                raise CannotTellError(f"the server's metrics are impossible: {wrong}")
            if not counts.drafted:
                raise CannotTellError("the server drafted nothing: there is no speculation to plan")
        if longer := self._longer:
            raise CannotTellError(f"{self.depth} is not the server's draft length: {longer}; see --depth")
        if counted is None and seen is None:
            raise CannotTellError("the server reports nothing about its drafts, and its streams do not show its passes")
        if counted is not None and seen is not None and not 1 / AGREE < counted / seen < AGREE:
            raise CannotTellError(
                f"the server's metrics say {counted:.2f} tokens per pass, but {seen:.2f} arrive together"
            )

    @property
    def _longer(self) -> str:
        """The evidence of a draft longer than ``depth``, "" if there is none."""
        counts = self.counts
        if counts is not None and any(counts.by_position[self.depth :]):
            return f"it accepted draft tokens at position {sum(map(bool, counts.by_position))}"
        if counts is not None and counts.per_step is not None:
            longer = counts.per_step > _LONGER * self.depth
            return f"it drafted {counts.per_step:.1f} tokens a step" if longer else ""
        sizes = [round(size) for text in self.texts for size in text]
        beyond = sum(size > self.depth + 1 for size in sizes)
        return f"up to {max(sizes)} tokens arrive together" if beyond > (_MERGED + self.merged) * len(sizes) else ""

    def differs(self, pooled: "EndpointAcceptance") -> float | None:
        """Returns the ratio of its tokens per pass to those of more waves, None if chance explains the difference."""
        try:
            here, all_waves = self.at(self.depth), pooled.at(self.depth)
        except CannotTellError:
            return None
        ratio = (self.counted or self.seen or here.mean) / (pooled.counted or pooled.seen or all_waves.mean)
        return ratio if abs(math.log(ratio)) > math.hypot(here.width, all_waves.width) else None

    def at(self, depth: int) -> TokensPerPass:
        """Returns tokens per pass at a draft length. Raises CannotTellError for too few requests."""
        if not self.texts:
            return self._geometric(depth)
        replays = [self._replayed(text, depth) for text in self.texts]
        tokens, passes = [sum(map(sum, each)) for each in replays], [sum(map(len, each)) for each in replays]
        if len(tokens) < _MIN_REQUESTS:
            raise CannotTellError(f"{len(tokens)} requests are too few for an interval; at least {_MIN_REQUESTS} count")
        interval = ratio_interval(tokens, passes)
        scale = self.counted / self.seen if self.counted and self.seen else 1.0  # counts have no error of timing
        sizes = [size for each in replays for replay in each for size in replay]
        positions = tuple(sum(size > k for size in sizes) / len(sizes) for k in range(1, depth + 1))
        return TokensPerPass(max(1.0, interval.estimate * scale), math.sqrt(2) * interval.width, depth, positions)

    def _geometric(self, depth: int) -> TokensPerPass:
        """Returns tokens per pass from the counts alone, with one acceptance rate for all positions beyond those.

        Its width is that of binomial counts, doubled because texts differ.
        """
        counted, counts = self.counted, self.counts
        if counted is None or counts is None:
            raise CannotTellError("the server reports nothing about its drafts")
        passes = max(1.0, self.tokens - counts.accepted)
        if passes < 10 * _MIN_REQUESTS:
            raise CannotTellError(f"{passes:.0f} passes are too few for an interval")
        reach = [accepted / passes for accepted in counts.by_position[: self.depth]]
        if not reach:
            # acceptance rate with 1 + rate + ... + rate^depth = counted
            rate = root(lambda rate: sum(rate**k for k in range(self.depth + 1)) - counted, 0.0, 1.0)
            reach = [rate**k for k in range(1, self.depth + 1)]
        last = reach[-1] / reach[-2] if len(reach) > 1 and reach[-2] > 0 else reach[-1]
        while len(reach) < depth:
            reach.append(reach[-1] * min(1.0, last))
        mean = 1.0 + sum(reach[:depth])
        variance = max(0.0, sum((2 * k + 1) * p for k, p in enumerate(reach[:depth])) - (mean - 1.0) ** 2)
        return TokensPerPass(mean, 2 * 1.96 * math.sqrt(2 * variance / passes) / mean, depth, tuple(reach[:depth]))

    def _replayed(self, text: Sequence[float], depth: int) -> list[list[int]]:
        """Returns the tokens of every pass at a draft length, for several replays."""
        sizes = [max(1, round(size)) for size in text]
        if depth == self.depth:
            return [sizes]
        chance = random.Random(f"{len(text)}/{depth}")
        replays = []
        for _ in range(_REPEATS):
            well: list[bool] = []  # for each token of the text, whether it is drafted well
            for size in sizes:
                well += [True] * (size - 1)
                well.append(size > self.depth and chance.random() < self._last_rate)
            replays.append(_passes(well, depth))
        return replays

    @cached_property
    def _last_rate(self) -> float:
        """Acceptance rate of the last draft token, given all before it."""
        sizes = [max(1, round(size)) for text in self.texts for size in text]
        before = sum(size >= self.depth for size in sizes)
        return sum(size > self.depth for size in sizes) / before if before else 0.0


def _passes(well: Sequence[bool], depth: int) -> list[int]:
    """Returns the tokens of the passes at a draft length over a text, without one that its end cuts."""
    passes, at = [], 0
    while at < len(well):
        size = 0
        while size < depth and at + size < len(well) and well[at + size]:
            size += 1
        if at + size + 1 > len(well):
            break
        passes.append(size + 1)
        at += size + 1
    return passes or [1]


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
    waves: Sequence[Wave], beside: Sequence[Wave], plain: PassSeconds, tokens_per_pass: float, bursts: float | None
) -> PassSeconds | None:
    """Returns the seconds of a speculative pass in some waves of one size, None if fewer than two of them were full.

    A wave is compared with the plain one of its round, which was sent next to it, so that a slow machine slows both.
    bursts: of a pass, 1 unless some hold two passes; None if bursts are no passes. The seconds of a pass need few
    texts, those of a token vary with the number of accepted tokens.
    """
    full = [wave.streams for wave in waves if wave.streams]
    if len(full) < 2:
        return None
    if bursts is None:
        seconds = [sum(stream.seconds for stream in streams) for streams in full]
        tokens = [sum(stream.tokens for stream in streams) for streams in full]
        interval = ratio_interval(seconds, tokens)
        return PassSeconds(interval.estimate * tokens_per_pass, interval.width, tokens_per_pass)
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

    Its standard error is 1.09 times that of the mean of normal values, here corrected for few values.
    """
    count = len(values)
    kept = sorted(values)[count // 4 : count - count // 4]
    deviation = standard_deviation(values) * count / (count - 0.8)
    width = student_quantile(0.5 + LEVEL / 2, count - 1) * 1.09 * deviation / math.sqrt(count)
    return sum(kept) / len(kept), width / median(values)


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
        columns: dict[int, dict[int, PassSeconds]] = {depth: {} for depth in self.depths}
        for (depth, number), value in self.speculative.items():
            columns[depth][number] = value
        return {depth: _along(column, concurrency) for depth, column in columns.items()}

    def _with_fixed(self, depth: int, concurrency: int, measured: int, end: PassSeconds, fixed: float) -> float:
        """Returns the seconds at a draft length other than ``measured`` for a fixed fraction of the overhead."""
        plain, verified = (self.plain_pass(concurrency * rows).seconds for rows in (1, measured + 1))
        overhead, scale = end.seconds - verified, fixed + (1.0 - fixed) * depth / measured
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
        return fraction * max(0.0, end.seconds - self.plain_pass(concurrency * (depth + 1)).seconds)


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
