"""Speculation across workers, simulated event by event: what a placement gains before it is built.

The models are clocks: a target pass and a draft step take fixed times, and acceptance is drawn. Results follow from the
setting and its seed alone. ``plan.pipelines`` holds what can be said on paper.
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
MARGIN = 1.01  # over the best sequential strategy, from which pipelining is said to pay
PLACES = 1_000_000  # tokens at most


@dataclass(frozen=True, slots=True)
class Setting:
    """Workers and a text. target, draft, rtt: seconds of a target pass, of a draft step, and there and back between.

    acceptance: the chance of a drafted token, by its position since the last of the target's own, the last value for
    all further ones. depth: tokens drafted before a pass is asked for (gamma, lookahead). verifiers: target servers,
    which only ``dsi`` uses beyond the first. tokens: how long the text is.
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
        integer("tokens", self.tokens, 1, PLACES)
        integer("seed", self.seed, 0)
        if not self.acceptance:
            raise InvalidRequest("acceptance must hold one chance, or one for each position, got none")
        for position, chance in enumerate(self.acceptance, 1):
            number(f"acceptance at position {position}", chance, 0.0, 1.0)
        if self.target == 0.0 or self.draft == 0.0:
            raise InvalidRequest(f"passes must take time, got {self.target} s of the target and {self.draft} s of the "
                                 "draft")  # fmt: skip


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What one strategy did. drafting, verifying: the share of the time that the drafter and the servers were busy.

    seconds: until the text was done. wasted: drafted tokens that did not become text. over_plain, over_si: speed-ups in
    seconds a token over the target alone and over sequential speculation on the same text.
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
    """Outcomes of every strategy by a value that was varied. by: one of ``SWEEPS``; values in its own unit, or s."""

    by: str
    values: tuple[float, ...]
    outcomes: tuple[tuple[SimulationResult, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def simulate(
    setting: Setting, strategies: Sequence[str] = STRATEGIES, repeats: int = 1
) -> tuple[SimulationResult, ...]:
    """Every one of ``strategies`` on the same texts, ``repeats`` of them; times and counts are sums over the texts.

    Raises InvalidRequest for a strategy that is not known, and where SimPy is not installed.
    """
    integer("repeats", repeats, 1)
    for name in strategies:
        if name not in STRATEGIES:
            raise InvalidRequest(f"no strategy {name!r}: choose from {', '.join(STRATEGIES)}")
    texts = [replace(setting, seed=setting.seed * 1_000_003 + text) for text in range(repeats)]
    wanted = dict.fromkeys((*strategies, "plain", "si"))
    found = {name: _sum([_run(text, name) for text in texts]) for name in wanted}
    paces = {name: one.seconds / one.tokens for name, one in found.items()}
    return tuple(
        replace(found[name], over_plain=paces["plain"] / paces[name], over_si=paces["si"] / paces[name])
        for name in dict.fromkeys(strategies)
    )


def sweep(
    setting: Setting, by: str, values: Sequence[float], strategies: Sequence[str] = STRATEGIES, repeats: int = 1
) -> Sweep:
    """``simulate`` at each of ``values`` of ``by``, one of ``SWEEPS``; times in seconds."""
    if by not in SWEEPS:
        raise InvalidRequest(f"cannot sweep {by!r}: choose from {', '.join(SWEEPS)}")
    if not values:
        raise InvalidRequest(f"no values of {by} to sweep over")
    found = tuple(simulate(varied(setting, by, value), strategies, repeats) for value in values)
    return Sweep(by, tuple(values), found)


def varied(setting: Setting, by: str, value: float) -> Setting:
    """The setting with one value changed. Raises InvalidRequest where it does not fit."""
    if by == "verifiers" and value != int(value):
        raise InvalidRequest(f"verifiers must be whole numbers, got {value:g}")
    changed: Any = (value,) if by == "acceptance" else int(value) if by == "verifiers" else float(value)
    return replace(setting, **{SWEEPS[by]: changed})


def waiting(outcomes: Iterable[SimulationResult]) -> float:
    """The best speed-up over plain that needs no pipeline: plain and sequential count, whether asked for or not."""
    gains = [(one.over_plain, one.over_plain / one.over_si, one.strategy) for one in outcomes]
    return max([1.0, *(gain if name not in PIPELINED else si for gain, si, name in gains)])


def pays(outcomes: Sequence[SimulationResult]) -> SimulationResult | None:
    """The fastest pipelined outcome, if it beats everything that waits by ``MARGIN``."""
    piped = [one for one in outcomes if one.strategy in PIPELINED]
    best = max(piped, key=lambda one: one.over_plain, default=None)
    return best if best is not None and best.over_plain > MARGIN * waiting(outcomes) else None


def _run(setting: Setting, name: str) -> SimulationResult:
    try:
        import simpy

        from foretoken.plan.simulation import strategies
    except ImportError as error:
        raise InvalidRequest("the simulator needs SimPy; pip install 'foretoken[simulate]'") from error
    env = simpy.Environment()
    tape = strategies.Tape(setting.acceptance, setting.seed)
    work = strategies.SimulatedRequest(env, tape, setting.tokens, setting.verifiers)
    env.process(strategies.STRATEGIES[name](work, setting.target, setting.draft, setting.depth, setting.rtt))
    env.run(until=work.done)
    seconds = env.now
    busy = work.verifying / (seconds * (setting.verifiers if name == "dsi" else 1))
    return SimulationResult(
        name, work.tokens, seconds, work.drafted, work.accepted, work.drafted - work.accepted, work.passes,
        min(1.0, work.drafting / seconds), min(1.0, busy), math.nan, math.nan,
    )  # fmt: skip


def _sum(outcomes: Sequence[SimulationResult]) -> SimulationResult:
    """Counts and seconds add up; shares are means over the time."""
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
