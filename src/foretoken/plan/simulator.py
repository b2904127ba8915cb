"""Discrete-event simulation of speculative decoding across workers, and the speedup of drafting on another machine.

The models are clocks: a target pass and a draft pass take fixed times, and acceptance is sampled. Results depend on the
setting and its seed alone. For a plan, times and acceptance are the measured ones. The other machine is assumed to
draft as fast as this one, one target serves one request, and the acceptance of a draft token depends on its position
since the last token of the target's own. The speedup measured here is listed as "local".
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from foretoken.core.checks import integer, number
from foretoken.core.errors import InvalidRequest
from foretoken.plan.candidates import PlanRow
from foretoken.plan.strategies import STRATEGIES, Setting, SimulatedRequest

PIPELINED = ("dsi", "pearl")
MARGIN = 1.01  # speedup over the best sequential strategy from which pipelining is called profitable


class SweptValue(NamedTuple):
    """A value of the setting that a sweep varies."""

    name: str  # of the field of ``Setting``
    scale: float  # from its unit to the user's
    label: str  # of an axis
    unit: str  # behind a value


SWEEPS = {
    "rtt": SweptValue("rtt", 1e3, "round trip, ms", " ms round trip"),
    "acceptance": SweptValue("acceptance", 1.0, "acceptance", " acceptance"),
    "verifiers": SweptValue("verifiers", 1.0, "target servers", " target servers"),
    "draft-ms": SweptValue("draft", 1e3, "draft step, ms", " ms a draft step"),
}


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of one strategy. Speedups are ratios of seconds per token on the same texts."""

    strategy: str
    tokens: int  # emitted
    seconds: float  # until the texts were done
    drafted: int  # draft tokens
    accepted: int  # of them
    wasted: int  # draft tokens that did not become text
    passes: int  # of the target
    drafting: float  # fraction of the time in which the drafting worker was busy
    verifying: float  # fraction of the time in which the target servers were busy
    over_plain: float = math.nan  # speedup over the target alone
    over_si: float = math.nan  # speedup over sequential speculation


@dataclass(frozen=True, slots=True)
class Sweep:
    """Results of every strategy by a value that was varied."""

    by: str  # of ``SWEEPS``
    values: tuple[float, ...]  # times in seconds
    outcomes: tuple[tuple[SimulationResult, ...], ...]  # at each value


def simulate(
    setting: Setting, strategies: Sequence[str] = tuple(STRATEGIES), repeats: int = 1
) -> tuple[SimulationResult, ...]:
    """Simulates every strategy on the same texts.

    Args:
        strategies: Names out of ``STRATEGIES``.
        repeats: Number of texts. Times and counts are sums over them.

    Raises:
        InvalidRequest: A strategy is not known, or SimPy is not installed.
    """
    integer("repeats", repeats, 1)
    for name in strategies:
        if name not in STRATEGIES:
            raise InvalidRequest(f"no strategy {name!r}: choose from {', '.join(STRATEGIES)}")
    texts = [replace(setting, seed=setting.seed * 1_000_003 + text) for text in range(repeats)]
    names = dict.fromkeys((*strategies, "plain", "si"))
    results = {name: _run(texts, name) for name in names}
    paces = {name: one.seconds / one.tokens for name, one in results.items()}
    return tuple(
        replace(results[name], over_plain=paces["plain"] / paces[name], over_si=paces["si"] / paces[name])
        for name in dict.fromkeys(strategies)
    )


def sweep(
    setting: Setting, by: str, values: Sequence[float], strategies: Sequence[str] = tuple(STRATEGIES), repeats: int = 1
) -> Sweep:
    """Runs ``simulate`` at each of ``values`` of ``by``, one of ``SWEEPS``, times in seconds."""
    if by not in SWEEPS:
        raise InvalidRequest(f"cannot sweep {by!r}: choose from {', '.join(SWEEPS)}")
    if not values:
        raise InvalidRequest(f"no values of {by} to sweep over")
    outcomes = tuple(simulate(varied(setting, by, value), strategies, repeats) for value in values)
    return Sweep(by, tuple(values), outcomes)


def varied(setting: Setting, by: str, value: float) -> Setting:
    """Returns the setting with one value changed. Raises InvalidRequest for a value that is not valid."""
    if by == "verifiers" and value != int(value):
        raise InvalidRequest(f"verifiers must be whole numbers, got {value:g}")
    changed: Any = (value,) if by == "acceptance" else int(value) if by == "verifiers" else float(value)
    return replace(setting, **{SWEEPS[by].name: changed})


def sequential_speedup(outcomes: Iterable[SimulationResult]) -> float:
    """Returns the speedup over plain decoding that a pipeline must exceed: that of the best strategy without one.

    Plain decoding and sequential speculation count even if they are not among ``outcomes``.
    """
    speedups = [(one.over_plain, one.over_plain / one.over_si, one.strategy) for one in outcomes]
    return max([1.0, *(own if name not in PIPELINED else si for own, si, name in speedups)])


def pays(outcomes: Sequence[SimulationResult]) -> SimulationResult | None:
    """Returns the fastest pipelined result if it exceeds ``sequential_speedup`` by ``MARGIN``, else None."""
    pipelined = [one for one in outcomes if one.strategy in PIPELINED]
    best = max(pipelined, key=lambda one: one.over_plain, default=None)
    return best if best is not None and best.over_plain > MARGIN * sequential_speedup(outcomes) else None


def _run(texts: Sequence[Setting], name: str) -> SimulationResult:
    """Returns the sums over all texts. A worker is busy for no longer than its text takes."""
    try:
        import simpy
    except ImportError as error:
        raise InvalidRequest("the simulator needs SimPy; pip install 'foretoken[simulate]'") from error
    works: list[SimulatedRequest] = []
    seconds = drafting = verifying = 0.0
    for text in texts:
        env = simpy.Environment()
        work = SimulatedRequest(env, text)
        env.process(STRATEGIES[name](work))
        env.run(until=work.done)
        seconds += env.now
        drafting += min(env.now, work.drafting)
        verifying += min(env.now, work.verifying / (text.verifiers if name == "dsi" else 1))
        works.append(work)
    drafted, accepted = sum(work.drafted for work in works), sum(work.accepted for work in works)
    return SimulationResult(
        strategy=name,
        tokens=sum(work.tokens for work in works),
        seconds=seconds,
        drafted=drafted,
        accepted=accepted,
        wasted=drafted - accepted,
        passes=sum(work.passes for work in works),
        drafting=drafting / seconds,
        verifying=verifying / seconds,
    )


LOCAL = "local"
REMOTE_STRATEGIES = ("si", "dsd", "pearl", "dsi")
MAX_DRAFTS = 2  # draft models at each temperature, the fastest here first
TOKENS = 1000  # tokens of the simulated text


@dataclass(frozen=True, slots=True)
class DraftingOption:
    """One way to use a draft model."""

    strategy: str  # ``LOCAL``, as timed, or one of ``REMOTE_STRATEGIES``
    depth: int | None  # draft length, None if the strategy chooses its own
    speedup: float  # of decoding over plain decoding here


@dataclass(frozen=True, slots=True)
class RemoteDraftingEstimate:
    """All options of one draft model at one temperature."""

    name: str  # of the candidate
    temperature: float
    rtt: float  # seconds of a round trip
    options: tuple[DraftingOption, ...]  # ``LOCAL`` and each strategy at its best draft length

    @property
    def local(self) -> DraftingOption:
        return next(option for option in self.options if option.strategy == LOCAL)

    @property
    def best(self) -> DraftingOption:
        """The fastest option with the draft on the other machine."""
        return max((option for option in self.options if option.strategy != LOCAL), key=lambda option: option.speedup)

    @property
    def verdict(self) -> str:
        best, local = self.best, self.local
        there = best.strategy + ("" if best.depth is None else f", {best.depth} tokens")
        where = f"{self.name} at temperature {self.temperature:g}"
        if max(best.speedup, local.speedup) <= 1.0:
            return f"{where}: plain decoding; drafting is profitable neither here nor {1e3 * self.rtt:g} ms away"
        if best.speedup > MARGIN * local.speedup:
            return f"{where}: draft there ({there}): {best.speedup:.2f}x plain, {local.speedup:.2f}x by drafting here"
        return f"{where}: draft here: {local.speedup:.2f}x plain, {best.speedup:.2f}x at best there ({there})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"best": asdict(self.best), "verdict": self.verdict}


def check_rtt(rtt_ms: float | None, batches: Sequence[int]) -> None:
    """Checks, before anything is measured, that ``remote_drafting`` can answer.

    Raises InvalidRequest if the round trip is negative, no batch is 1, or SimPy is not installed.
    """
    number("--rtt", rtt_ms, 0.0, optional=True)
    if rtt_ms is not None and 1 not in batches:
        raise InvalidRequest("--rtt predicts one request at a time; let 1 be among the batches")
    if rtt_ms is not None:
        simulate(Setting(1.0, 1.0, (0.5,), tokens=1), ("plain",))


def remote_drafting(rows: Sequence[PlanRow], rtt: float) -> tuple[RemoteDraftingEstimate, ...]:
    """Returns estimates for the best draft models that draft chains, at every temperature and batch 1.

    rows: of a plan. rtt: seconds of a round trip.
    """
    return tuple(
        RemoteDraftingEstimate(chains[0].name, temperature, rtt, tuple(_options(chains, rtt)))
        for temperature in dict.fromkeys(row.temperature for row in rows)
        for chains in _fastest([row for row in rows if row.temperature == temperature])
    )


def _fastest(rows: Sequence[PlanRow]) -> list[list[PlanRow]]:
    """Returns the rows of each of the best draft models, by draft length."""
    drafts: dict[str, list[PlanRow]] = {}
    for row in rows:
        if row.method == "draft_model" and row.config.get("tree", "chain") == "chain" and row.batch == 1:
            drafts.setdefault(row.name, []).append(row)
    ordered = sorted(drafts.values(), key=lambda own: max(row.speedup for row in own), reverse=True)
    return [sorted(own, key=lambda row: row.num_speculative_tokens) for own in ordered[:MAX_DRAFTS]]


def _options(rows: Sequence[PlanRow], rtt: float) -> Iterator[DraftingOption]:
    top = max(rows, key=lambda row: row.speedup)
    yield DraftingOption(LOCAL, top.num_speculative_tokens, top.speedup)
    chances = conditional(rows[-1].acceptance)
    for strategy in REMOTE_STRATEGIES:
        own_window = strategy == "dsd"
        tried = [_simulated(row, chances, strategy, rtt) for row in (rows[-1:] if own_window else rows)]
        best = max(tried, key=lambda option: option.speedup)
        yield DraftingOption(strategy, None, best.speedup) if own_window else best


def _simulated(row: PlanRow, chances: tuple[float, ...], strategy: str, rtt: float) -> DraftingOption:
    depth = row.num_speculative_tokens
    target, draft = row.step_seconds - row.draft_seconds, row.draft_seconds / depth
    setting = Setting(target, draft, chances, depth, rtt=rtt, tokens=TOKENS)
    (outcome,) = simulate(setting, (strategy,))
    return DraftingOption(strategy, depth, row.plain_seconds * outcome.tokens / outcome.seconds)


def conditional(acceptance: Sequence[float]) -> tuple[float, ...]:
    """Returns each position's acceptance given the earlier positions, from the share of steps accepted so deep."""
    before, result = 1.0, []
    for share in acceptance:
        if before <= 0.0:
            break
        result.append(min(1.0, share / before))
        before = share
    return tuple(result) or (0.0,)
