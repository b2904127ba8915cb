"""Discrete-event simulation of speculative decoding across workers.

The models are clocks: a target pass and a draft pass take fixed times, and acceptance is sampled. Results depend on the
setting and its seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest
from foretoken.plan.simulation.strategies import STRATEGIES, Setting, SimulatedRequest

PIPELINED = ("dsi", "pearl")
SWEEPS = {"rtt": "rtt", "acceptance": "acceptance", "verifiers": "verifiers", "draft-ms": "draft"}
MARGIN = 1.01  # speedup over the best sequential strategy from which pipelining is called profitable


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
        setting: Workers and text.
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
    return replace(setting, **{SWEEPS[by]: changed})


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
