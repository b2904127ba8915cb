"""Discrete-event simulation of speculative decoding across workers.

The models are clocks: a target pass and a draft pass take fixed times, and acceptance is sampled. Results depend on the
setting and its seed alone. ``pipelines`` holds the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from foretoken.core.checks import integer, number
from foretoken.core.errors import InvalidRequest

STRATEGIES = ("plain", "si", "dsi", "pearl", "dsd")
PIPELINED = ("dsi", "pearl")
SWEEPS = {"rtt": "rtt", "acceptance": "acceptance", "verifiers": "verifiers", "draft-ms": "draft"}
MARGIN = 1.01  # speedup over the best sequential strategy from which pipelining is called profitable
MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Setting:
    """Workers and a text.

    Args:
        target: Seconds of a target pass.
        draft: Seconds of a draft pass.
        acceptance: Acceptance of a draft token by its position since the last token of the target's own. The last value
            is that of all further positions.
        depth: Tokens drafted before a target pass is requested (gamma, lookahead).
        verifiers: Target servers. Only ``dsi`` uses more than one.
        rtt: Seconds of a round trip between draft and target.
        tokens: Length of the text.
        seed: Seed of the acceptance.
    """

    target: float
    draft: float
    acceptance: tuple[float, ...]
    depth: int = 5
    verifiers: int = 1
    rtt: float = 0.0
    tokens: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        number("target", self.target, 0.0)
        number("draft", self.draft, 0.0)
        number("rtt", self.rtt, 0.0)
        integer("depth", self.depth, 1)
        integer("verifiers", self.verifiers, 1)
        integer("tokens", self.tokens, 1, MAX_TOKENS)
        integer("seed", self.seed, 0)
        if not self.acceptance:
            raise InvalidRequest("acceptance must hold one chance, or one for each position, got none")
        for position, chance in enumerate(self.acceptance, 1):
            number(f"acceptance at position {position}", chance, 0.0, 1.0)
        if self.target == 0.0 or self.draft == 0.0:
            raise InvalidRequest(
                f"passes must take time, got {self.target} s of the target and {self.draft} s of the draft"
            )


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of one strategy.

    Args:
        strategy: Its name.
        tokens: Emitted tokens.
        seconds: Seconds until the text was done.
        drafted: Draft tokens.
        accepted: Accepted draft tokens.
        wasted: Draft tokens that did not become text.
        passes: Target passes.
        drafting: Share of the time in which the drafting worker was busy.
        verifying: Share of the time in which the target servers were busy.
        over_plain: Speedup in seconds per token over the target alone on the same text.
        over_si: Speedup in seconds per token over sequential speculation on the same text.
    """

    strategy: str
    tokens: int
    seconds: float
    drafted: int
    accepted: int
    wasted: int
    passes: int
    drafting: float
    verifying: float
    over_plain: float
    over_si: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """Results of every strategy by a value that was varied.

    Args:
        by: One of ``SWEEPS``.
        values: Its values, times in seconds.
        outcomes: Results at each value.
    """

    by: str
    values: tuple[float, ...]
    outcomes: tuple[tuple[SimulationResult, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the sweep for JSON."""
        return asdict(self)


def simulate(
    setting: Setting, strategies: Sequence[str] = STRATEGIES, repeats: int = 1
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
    results = {name: _sum([_run(text, name) for text in texts]) for name in names}
    paces = {name: one.seconds / one.tokens for name, one in results.items()}
    return tuple(
        replace(results[name], over_plain=paces["plain"] / paces[name], over_si=paces["si"] / paces[name])
        for name in dict.fromkeys(strategies)
    )


def sweep(
    setting: Setting, by: str, values: Sequence[float], strategies: Sequence[str] = STRATEGIES, repeats: int = 1
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


def _run(setting: Setting, name: str) -> SimulationResult:
    try:
        import simpy

        from foretoken.plan.simulation import strategies
    except ImportError as error:
        raise InvalidRequest("the simulator needs SimPy; pip install 'foretoken[simulate]'") from error
    env = simpy.Environment()
    tape = strategies.AcceptanceTape(setting.acceptance, setting.seed)
    work = strategies.SimulatedRequest(env, tape, setting.tokens, setting.verifiers)
    env.process(strategies.STRATEGIES[name](work, setting.target, setting.draft, setting.depth, setting.rtt))
    env.run(until=work.done)
    seconds = env.now
    busy = work.verifying / (seconds * (setting.verifiers if name == "dsi" else 1))
    return SimulationResult(
        strategy=name,
        tokens=work.tokens,
        seconds=seconds,
        drafted=work.drafted,
        accepted=work.accepted,
        wasted=work.drafted - work.accepted,
        passes=work.passes,
        drafting=min(1.0, work.drafting / seconds),
        verifying=min(1.0, busy),
        over_plain=math.nan,
        over_si=math.nan,
    )


def _sum(outcomes: Sequence[SimulationResult]) -> SimulationResult:
    """Adds counts and seconds, and averages shares over the time."""
    seconds = sum(one.seconds for one in outcomes)
    counts = {
        field.name: sum(getattr(one, field.name) for one in outcomes)
        for field in fields(SimulationResult)
        if field.name in ("tokens", "drafted", "accepted", "wasted", "passes")
    }
    shares = {
        name: sum(getattr(one, name) * one.seconds for one in outcomes) / seconds for name in ("drafting", "verifying")
    }
    return replace(outcomes[0], seconds=seconds, **counts, **shares)
