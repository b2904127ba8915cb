"""Tokens per pass of a server's drafter at its own draft length and at others, from its counts and its streams.

The server's counts are compared with the bursts in which tokens arrive; a plan needs both to agree. Another draft
length is replayed over the bursts. A pass that accepted n of K draft tokens says that the next n tokens are drafted
well and, if n < K, that the one after them is not. A pass of length d accepts the tokens that are drafted well up to
the first that is not, d at most. The token after a fully accepted draft was not drafted: it counts as drafted well as
often as the tokens before it were at the last position.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from foretoken.plan.statistics import ratio_interval
from foretoken.probe.counters import DraftCounts, summed
from foretoken.probe.waves import Wave
from foretoken.probe.workload import CannotTellError

LEVEL = 0.95
AGREE = 1.2  # ratio of tokens per pass by metrics and by bursts up to which both agree
_BATCHED = 1.15  # tokens that arrive together without speculation, from which bursts are no passes
_OVERSHOT = 1.1  # ratio of steps to passes that texts cut short explain
_REPEATS = 4  # replays of a text, for the tokens that were not drafted
_LONGER = 1.05  # ratio of a step's draft tokens to the draft length, from which that length is wrong
_SHORTER = 0.7  # ratio below which a server often drafts less
_MERGED = 0.02  # fraction of bursts that may hold several passes
_MIN_REQUESTS = 4  # from which an interval is estimated


@dataclass(frozen=True, slots=True)
class TokensPerPass:
    """Tokens per pass. width: half the relative width of its interval for another sample of as many requests."""

    mean: float
    width: float
    drafted: float
    positions: tuple[float, ...] = ()


@dataclass(frozen=True)
class EndpointAcceptance:
    """Acceptance of a server's drafter at one draft length.

    Attributes:
        depth: Its draft length.
        counts: Counts of the server over all waves, None if it has none.
        tokens: Generated tokens of those waves without the first of each request.
        texts: For each request, the tokens of its bursts; none if bursts are no passes.
        merged: Fraction of the bursts without speculation that have more than one token.
    """

    depth: int
    counts: DraftCounts | None
    tokens: float
    texts: tuple[tuple[float, ...], ...]
    merged: float = 0.0

    @classmethod
    def of(cls, depth: int, plain: Sequence[Wave], waves: Sequence[Wave]) -> EndpointAcceptance:
        """Returns the acceptance in some waves. plain: waves without speculation, which tell if bursts are passes."""
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
        if self.counts is None or not self.counts.steps:
            return None
        drafted = self.counts.drafted / self.counts.steps
        return drafted if drafted < _SHORTER * self.depth else None

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
            raise CannotTellError("the server tells nothing about its drafts, and its streams do not show its passes")
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
        if counts is not None and counts.steps:
            drafted = counts.drafted / counts.steps
            return f"it drafted {drafted:.1f} tokens a step" if drafted > _LONGER * self.depth else ""
        sizes = [round(size) for text in self.texts for size in text]
        beyond = sum(size > self.depth + 1 for size in sizes)
        return f"up to {max(sizes)} tokens arrive together" if beyond > (_MERGED + self.merged) * len(sizes) else ""

    def differs(self, pooled: EndpointAcceptance) -> float | None:
        """Returns the ratio of its tokens per pass to those of more waves, None if chance explains the difference."""
        try:
            here, all_waves = self.at(self.depth), pooled.at(self.depth)
        except CannotTellError:
            return None
        ratio = (self.counted or self.seen or here.mean) / (pooled.counted or pooled.seen or all_waves.mean)
        return ratio if abs(math.log(ratio)) > math.hypot(here.width, all_waves.width) else None

    def at(self, depth: int) -> TokensPerPass:
        """Returns tokens per pass at a draft length.

        Raises:
            CannotTellError: There are too few requests.
        """
        if not self.texts:
            return self._geometric(depth)
        replays = [self._replayed(text, depth) for text in self.texts]
        tokens, passes = [sum(map(sum, each)) for each in replays], [sum(map(len, each)) for each in replays]
        if len(tokens) < _MIN_REQUESTS:
            raise CannotTellError(f"{len(tokens)} requests are too few for an interval; at least {_MIN_REQUESTS} count")
        mean, low, high = ratio_interval(tokens, passes, LEVEL)
        scale = self.counted / self.seen if self.counted and self.seen else 1.0  # counts have no error of timing
        sizes = [size for each in replays for replay in each for size in replay]
        positions = tuple(sum(size > k for size in sizes) / len(sizes) for k in range(1, depth + 1))
        return TokensPerPass(max(1.0, mean * scale), math.sqrt(2) * (high - low) / 2 / mean, depth, positions)

    def _geometric(self, depth: int) -> TokensPerPass:
        """Returns tokens per pass from the counts alone, with one acceptance rate for all positions beyond those.

        Its width is that of binomial counts, doubled because texts differ.
        """
        counted, counts = self.counted, self.counts
        if counted is None or counts is None:
            raise CannotTellError("the server tells nothing about its drafts")
        passes = max(1.0, self.tokens - counts.accepted)
        if passes < 10 * _MIN_REQUESTS:
            raise CannotTellError(f"{passes:.0f} passes are too few for an interval")
        reach = [accepted / passes for accepted in counts.by_position[: self.depth]]
        if not reach:
            rate = _rate(counted, self.depth)
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


def _rate(mean: float, depth: int) -> float:
    """Returns the acceptance rate a with 1 + a + ... + a^depth = mean."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(depth + 1)) < mean else (low, middle)
    return (low + high) / 2
