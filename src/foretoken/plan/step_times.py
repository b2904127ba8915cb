"""The time of a speculative step beside a plain one, from timed steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.costs.curve import Curve
from foretoken.plan.statistics import standard_deviation
from foretoken.plan.step_timing import LaneTimes, TimedStep, Visit

_ANY = ""  # among lanes' names: all of them together
_ALIKE = 0.06  # relative differences between plain passes below which they say little about other times
_DRIFT = 0.01  # relative error of any ratio of two times on one machine, however often measured


class StepTime(NamedTuple):
    """Time of a batch's step."""

    seconds: float
    propose: float  # seconds of drafting
    over_plain: float  # time over that of a plain step
    error: float  # relative error of ``over_plain``


class SpeedSample(NamedTuple):
    """Seconds of an operation at one visit, and of the plain pass beside it."""

    weight: int  # number of timed steps
    seconds: float
    plain: float


class PassTimes:
    """Seconds of the target's passes at one batch size, by lane and rows.

    They do not depend on the temperature, so visits at all temperatures count. Each visit contributes its median,
    because steps may be disturbed. Visits differ in the machine's speed: plain passes are memory-bound and long ones
    compute-bound, so neither a pass's seconds nor their ratio to a plain pass are constant. See ``at_speed``.

    between: seconds of plain passes at other moments of the same time.
    """

    def __init__(self, visits: Sequence[Visit], between: Sequence[float] = ()) -> None:
        samples: dict[tuple[str, int], list[SpeedSample]] = defaultdict(list)
        for visit in visits:
            for key, pairs in _passes(visit).items():
                own, plain = zip(*pairs, strict=True)
                samples[key].append(SpeedSample(len(pairs), median(own), fmean(plain)))
        self.plain = fmean([*(fmean(map(_plain_pass, visit.values())) for visit in visits), *between])
        self._of = {key: at_speed(each, self.plain) for key, each in samples.items()}
        self._curve = Curve.of({rows: seconds for (name, rows), seconds in self._of.items() if name == _ANY})

    def of(self, lane: str, rows: int) -> float:
        """Returns the seconds of a lane's passes over ``rows`` rows."""
        return self._of[lane, rows]

    def over(self, count: int) -> NDArray[np.float64]:
        """Returns the seconds of passes over 0, 1, ... rows, all lanes together, [count]."""
        return np.array([self._curve.between(rows) for rows in range(count)])


def at_speed(samples: Sequence[SpeedSample], plain: float) -> float:
    """Returns the seconds at the speed at which a plain pass takes ``plain``.

    This is the regression estimator of double sampling (Cochran, Sampling Techniques, 3rd edition, 12.6): expensive
    operations are timed at few moments, plain passes at many. The slope of the regression line lies between 0
    (compute-bound) and the ratio of the seconds to plain ones (memory-bound). It is shrunk towards that ratio where the
    moments are too similar.
    """
    weight, seconds, beside = np.array(samples).T
    weight = weight / weight.mean()
    own, middle = (weight * seconds).mean(), (weight * beside).mean()
    across, along = ((weight * (beside - middle) * each).sum() for each in (seconds - own, beside - middle))
    ratio, doubt = own / middle, (_ALIKE * middle) ** 2
    slope = np.clip((across + doubt * ratio) / (along + doubt), 0.0, ratio)
    return float(own + slope * (plain - middle))


class MeasuredStepTimes:
    """Step times at one temperature and batch size.

    passes: of this batch size at any temperature; None is those of ``visits``.
    """

    def __init__(self, visits: Sequence[Visit], batch: int, passes: PassTimes | None = None) -> None:
        self._visits, self._batch, self._passes = visits, batch, passes or PassTimes(visits)
        lanes = [lane for visit in visits for lane in visit.values()]
        self.plain = self._passes.plain + self._overhead([LaneTimes(lane.plain, lane.plain) for lane in lanes], median)

    def of(self, name: str, sizes: Mapping[int, float]) -> StepTime:
        """Returns the step time of a lane. sizes: fractions of the steps by number of draft tokens, of one sequence.

        If all timed drafts have one size, the pass takes its measured time, scaled by the curve of all passes where the
        end of a text shortens drafts. If sizes vary, a few steps are no fair sample of them: the pass is then averaged
        over ``sizes`` on that curve.
        """
        lanes = [visit[name] for visit in self._visits]
        rows = {step.rows for lane in lanes for step in lane.steps}
        same_rows, typical = len(rows) == 1, median if len(rows) == 1 else _mean_without_longest
        pass_seconds = self._mean_pass(sizes)
        if same_rows:
            full = rows.pop()
            pass_seconds *= self._passes.of(name, full) / float(self._passes.over(full + 1)[-1])
        overhead = self._overhead(lanes, typical)
        drafting = sum(typical([step.propose for step in lane.steps]) for lane in lanes)
        whole = sum(typical(list(map(_overhead, lane.steps))) for lane in lanes)
        over = (overhead + pass_seconds) / self.plain
        error = _joined([_relative(lane, over, same_rows=same_rows) for lane in lanes])
        propose = overhead * drafting / whole if whole else 0.0
        return StepTime(overhead + pass_seconds, propose, over, float(np.hypot(error, _DRIFT)))

    def _overhead(self, lanes: Sequence[LaneTimes], typical: Callable[[list[float]], float]) -> float:
        """Returns the seconds of a step outside of the target's pass. typical: of the steps of a lane."""
        samples = [
            SpeedSample(len(lane.steps), typical(list(map(_overhead, lane.steps))), _plain_pass(lane)) for lane in lanes
        ]
        return at_speed(samples, self._passes.plain)

    def _mean_pass(self, sizes: Mapping[int, float]) -> float:
        """Returns the mean seconds of a pass over a batch whose drafts have independent sizes."""
        drafted, shares = np.array(list(sizes)), np.array(list(sizes.values()))
        rows = np.bincount(drafted + 1, weights=shares)  # distribution of one sequence's rows
        total = rows
        for _ in range(self._batch - 1):
            total = np.convolve(total, rows)
        return float((total * self._passes.over(len(total))).sum() / total.sum())


def _overhead(step: TimedStep) -> float:
    return step.seconds - step.score


def _passes(visit: Visit) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Returns seconds of passes and of the plain one beside each, by lane and rows, and under ``_ANY`` by rows."""
    result: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for name, lane in visit.items():
        base = _plain_pass(lane)
        for step in lane.steps:
            result[name, step.rows].append((step.score, base))
        for step in (*lane.steps, *lane.plain):
            result[_ANY, step.rows].append((step.score, base))
    return result


def _plain_pass(lane: LaneTimes) -> float:
    """Returns the median seconds of a plain pass."""
    return median(step.score for step in lane.plain)


def _mean_without_longest(seconds: Sequence[float]) -> float:
    """Returns the typical seconds of an operation whose size varies.

    Like the median, it is never larger for a part of an operation, because each sorted value is at most its
    counterpart.
    """
    return fmean(sorted(seconds)[: max(1, len(seconds) - 1)])


def _relative(lane: LaneTimes, over: float, *, same_rows: bool) -> tuple[float, float]:
    """Returns the time of a step over a plain one at one visit, and its relative error."""
    if same_rows:
        ratios = [step.seconds / other.seconds for step, other in zip(lane.steps, lane.plain, strict=True)]
        return median(ratios), _error(ratios)
    overheads = [_overhead(step) for step in lane.steps]
    plain = median(step.seconds for step in lane.plain)
    return over, _error([1 + (each - median(overheads)) / (over * plain) for each in overheads])


def _joined(visits: Sequence[tuple[float, float]]) -> float:
    """Returns the relative error of the visits' mean: from their own errors, or if larger from their differences."""
    ratios, errors = zip(*visits, strict=True)
    own = sum(error**2 for error in errors) ** 0.5 / len(errors)
    differ = stdev(ratios) / fmean(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return max(own, differ)


def _error(ratios: Sequence[float]) -> float:
    """Returns the relative standard error of the median of normal values."""
    return 1.2533 * standard_deviation(ratios) / median(ratios) / len(ratios) ** 0.5
