"""From rounds that were timed to what a round takes beside a plain one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

import numpy as np

from foretoken.costs.curve import Array, Curve
from foretoken.plan.rounds import Timed, Turn, Visit

_ANY = ""  # among lanes' names: all of them together
_ALIKE = 0.06  # relative differences between plain passes below which they tell little of what follows them
_DRIFT = 0.01  # relative error of any ratio of two times on one machine, however often it was taken


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Seconds of a batch's round, and of drafting in it; over a plain step's, with the relative error of that ratio."""

    seconds: float
    propose: float
    over_plain: float
    error: float


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds of something at one visit, and of the plain pass beside it. weight: rounds that tell so."""

    weight: int
    seconds: float
    plain: float


class PassTimes:
    """Seconds of the target's passes of one batch, where a plain one takes ``plain``: of a lane by its rows, and of all
    lanes by rows.

    They do not depend on the temperature, so what was timed at any of them counts: medians of a visit, since a round
    may be disturbed, and of all visits what they tell of the machine's mean speed, since it is now faster and now
    slower. Plain passes wait for memory, long ones for arithmetic, so neither a pass's seconds nor their ratio to a
    plain one's stay the same: see ``at_speed``.
    """

    def __init__(self, visits: Sequence[Visit], between: Sequence[float] = ()) -> None:
        """between: seconds of plain passes at other moments of the same hour."""
        seen: dict[tuple[str, int], list[Seen]] = defaultdict(list)
        for visit in visits:
            for key, pairs in _passes(visit).items():
                own, plain = zip(*pairs, strict=True)
                seen[key].append(Seen(len(pairs), median(own), fmean(plain)))
        beside = [fmean(_plain(lane, lambda turn: turn.score) for lane in visit.values()) for visit in visits]
        self.plain = fmean([*beside, *between])
        self._of = {key: at_speed(found, self.plain) for key, found in seen.items()}
        self._curve = Curve.of({rows: seconds for (name, rows), seconds in self._of.items() if name == _ANY})

    def of(self, lane: str, rows: int) -> float:
        return self._of[lane, rows]

    def over(self, count: int) -> Array:
        """[count], of passes over 0, 1, ... rows, jagged curve and all."""
        return self._curve.over(np.arange(count, dtype=np.float64))


def at_speed(seen: Sequence[Seen], plain: float) -> float:
    """Seconds where a plain pass takes ``plain``: on the line through what was seen beside faster and slower ones.

    The regression estimator of double sampling (Cochran, Sampling Techniques, 3rd edition, 12.6): what is dear is timed
    at few moments, a plain pass at many. The line's slope lies between none (arithmetic) and the seconds' own ratio to
    plain ones (memory), and is drawn to that ratio where moments were too much alike to tell.
    """
    weight, seconds, beside = np.array([(each.weight, each.seconds, each.plain) for each in seen]).T
    weight = weight / weight.mean()
    own, middle = (weight * seconds).mean(), (weight * beside).mean()
    across, along = ((weight * (beside - middle) * each).sum() for each in (seconds - own, beside - middle))
    ratio, doubt = own / middle, (_ALIKE * middle) ** 2
    slope = np.clip((across + doubt * ratio) / (along + doubt), 0.0, ratio)
    return float(own + slope * (plain - middle))


class Times:
    """Round times at one temperature and batch, from the visits at which they were timed."""

    def __init__(self, visits: Sequence[Visit], batch: int, passes: PassTimes | None = None) -> None:
        """passes: of this batch at any temperature; None is of these visits."""
        self._visits, self._batch, self._passes = visits, batch, passes or PassTimes(visits)
        found = [each for visit in visits for each in visit.values()]
        self.plain = self._passes.plain + self._rest([Timed(each.plain, each.plain) for each in found], steady=True)

    def of(self, name: str, sizes: Mapping[int, float]) -> RoundTime:
        """sizes: shares of the rounds by drafted nodes, of one sequence.

        A lane whose drafts are of one size while it is timed took what it took, and less by as much as the curve of all
        passes says where a text's end leaves room for fewer. Where sizes vary, a few rounds are no fair sample of them:
        the pass is then that of the sizes' whole distribution, on that curve.
        """
        lanes = [visit[name] for visit in self._visits]
        rows = {turn.rows for lane in lanes for turn in lane.turns}
        steady = len(rows) == 1
        found = self._mixed(sizes)
        if steady:
            full = rows.pop()
            found *= self._passes.of(name, full) / float(self._passes.over(full + 1)[-1])
        rest = self._rest(lanes, steady=steady)
        drafting, whole = (
            sum(_part(lane, part, steady=steady) for lane in lanes) for part in (lambda turn: turn.propose, _rest)
        )
        over = (rest + found) / self.plain
        error = _joined([_relative(lane, over, steady=steady) for lane in lanes])
        return RoundTime(
            seconds=rest + found,
            propose=rest * drafting / whole if whole else 0.0,
            over_plain=over,
            error=float(np.hypot(error, _DRIFT)),
        )

    def _rest(self, lanes: Sequence[Timed], *, steady: bool) -> float:
        """Seconds of a round that are no pass."""
        seen = [
            Seen(len(lane.turns), _part(lane, _rest, steady=steady), _plain(lane, lambda turn: turn.score))
            for lane in lanes
        ]
        return at_speed(seen, self._passes.plain)

    def _mixed(self, sizes: Mapping[int, float]) -> float:
        """The mean pass of a batch whose drafts' sizes are independent."""
        known, shares = np.array(list(sizes)), np.array(list(sizes.values()))
        law = np.bincount(known + 1, weights=shares)  # of one sequence's rows
        total = law
        for _ in range(self._batch - 1):
            total = np.convolve(total, law)
        return float((total * self._passes.over(len(total))).sum() / total.sum())


def _rest(turn: Turn) -> float:
    return turn.seconds - turn.score


def _passes(visit: Visit) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """PassTimes and the plain one beside each, in seconds, by lane and rows, and under ``_ANY`` by rows."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for name, lane in visit.items():
        base = _plain(lane, lambda turn: turn.score)
        for turn in lane.turns:
            found[name, turn.rows].append((turn.score, base))
        for turn in (*lane.turns, *lane.plain):
            found[_ANY, turn.rows].append((turn.score, base))
    return found


def _plain(lane: Timed, part: Callable[[Turn], float]) -> float:
    """Seconds of a part of a plain round."""
    return median(part(turn) for turn in lane.plain)


def _part(lane: Timed, part: Callable[[Turn], float], *, steady: bool) -> float:
    """Seconds of a part of a round: the median, or where it varies the mean without the longest.

    Of a part of a part it is never more than of the whole, for each of the sorted is at most its counterpart.
    """
    parts = sorted(part(turn) for turn in lane.turns)
    return median(parts) if steady else fmean(parts[: max(1, len(parts) - 1)])


def _relative(lane: Timed, over: float, *, steady: bool) -> tuple[float, float]:
    """What one visit found a round to take, in plain ones, and the relative error of that."""
    if steady:
        ratios = [turn.seconds / other.seconds for turn, other in zip(lane.turns, lane.plain, strict=True)]
        return median(ratios), _error(ratios)
    rest = [_rest(turn) for turn in lane.turns]
    plain = median(turn.seconds for turn in lane.plain)
    return over, _error([1 + (each - median(rest)) / (over * plain) for each in rest])


def _joined(visits: Sequence[tuple[float, float]]) -> float:
    """The relative error of the visits' mean: what each knows of its own, or if that is more, how they differ."""
    found, errors = zip(*visits, strict=True)
    own = sum(error**2 for error in errors) ** 0.5 / len(errors)
    differ = stdev(found) / fmean(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return max(own, differ)


def _error(ratios: Sequence[float]) -> float:
    """Relative standard error of the median, from the median deviation; normal tails."""
    middle = median(ratios)
    deviation = 1.4826 * median(abs(ratio - middle) for ratio in ratios)
    return 1.2533 * deviation / middle / len(ratios) ** 0.5
