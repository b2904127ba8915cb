"""``foretoken simulate``: simulates drafting and verifying on different workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import ReportOptions
from foretoken.core.checks import integer, number
from foretoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    from foretoken.plan.simulator import SimulationResult, Sweep
    from foretoken.plan.strategies import Setting


class Varied(StrEnum):
    """Parameters that ``--sweep`` can vary."""

    RTT = "rtt"
    ACCEPTANCE = "acceptance"
    VERIFIERS = "verifiers"
    DRAFT_MS = "draft-ms"


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """The workers, the texts, and the strategies."""

    target_ms: float = option(30.0, "A pass of the target, in ms.")
    draft_ms: float = option(5.0, "A step of the draft, in ms.")
    acceptance: list[float] | None = option(
        None, "Chance of a drafted token; repeat it for one each by position, the last holds for the others. [0.8]"
    )
    depth: int = option(5, "Tokens drafted before a pass.", "--depth", "--lookahead")
    verifiers: int = option(0, "Target servers. 0: as many as DSI's formula asks for.")
    rtt: float = option(0.0, "Round trip between draft and target, in ms.")
    tokens: int = option(1000, "Tokens of a text.")
    strategy: list[str] | None = option(None, "plain, si, dsi, pearl or dsd (repeatable). [all]")
    seed: int = option(0, "The same seed gives the same figures.")
    repeats: int = option(3, "Texts.")

    @property
    def setting(self) -> Setting:
        """Workers and a text. Raises InvalidRequest."""
        from foretoken.plan.strategies import Setting, servers_needed

        verifiers = self.verifiers
        if not verifiers:
            number("--target-ms", self.target_ms, 0.0)
            number("--draft-ms", self.draft_ms, 0.0)
            integer("--depth", self.depth, 1)
            verifiers = servers_needed(self.target_ms, self.draft_ms, self.depth)
        return Setting(
            self.target_ms / 1e3,
            self.draft_ms / 1e3,
            tuple(self.acceptance or (0.8,)),
            self.depth,
            verifiers,
            self.rtt / 1e3,
            self.tokens,
            self.seed,
        )


@grouped
def simulate(
    simulated: SimulationOptions,
    sweep: Varied | None = option(None, "Vary this over --values."),
    values: str | None = option(None, "Evenly spaced, or a list: 1,2,4. Times in ms.", metavar="FROM:TO:COUNT"),
    *,
    report: ReportOptions,
) -> None:
    """Simulate speculation across workers: plain, sequential, distributed (DSI), parallel (PEARL), edge-cloud (DSD).

    Reports the speedup of each over plain decoding, and from which values on pipelining is profitable.
    """
    from foretoken.plan import simulator as workers
    from foretoken.plan.page import simulation_page
    from foretoken.plan.strategies import STRATEGIES

    setting, repeats = simulated.setting, simulated.repeats
    chosen, swept = tuple(dict.fromkeys(simulated.strategy or STRATEGIES)), None
    outcomes: tuple[SimulationResult, ...] = ()
    if sweep is not None:
        swept = workers.sweep(setting, sweep.value, _values(sweep, values), chosen, repeats)
        table, verdict = _gains(swept), _where(swept)
    else:
        outcomes = workers.simulate(setting, chosen, repeats)
        table, verdict = _table(outcomes), _whether(outcomes)

    facts = asdict(setting) | {"repeats": repeats, "unit": "seconds"}  # as all times in it
    profitable = any(map(workers.pays, [outcomes] if swept is None else swept.outcomes))
    record = {
        "setting": facts,
        "verdict": verdict,
        "outcomes": [asdict(one) for one in outcomes],
        "sweep": None if swept is None else asdict(swept),
        "pays": profitable,
    }
    page = partial(simulation_page, facts, swept or outcomes, verdict, profitable)
    report.publish(record, lambda: [table, Text(verdict, style="bold")], page)


def _values(sweep: Varied, text: str | None) -> list[float]:
    """Returns the values of a sweep, times in seconds. Raises InvalidRequest."""
    from foretoken.plan.simulator import SWEEPS

    if not text:
        raise InvalidRequest(f"--sweep {sweep.value} needs --values, FROM:TO:COUNT or a list such as 1,2,4")
    try:
        if ":" in text:
            low, high, count = text.split(":")
            steps = int(count) - 1
            if steps < 1:
                raise ValueError
            result = [float(low) + (float(high) - float(low)) * at / steps for at in range(steps + 1)]
        else:
            result = [float(each) for each in text.split(",")]
    except ValueError:
        raise InvalidRequest(
            f"--values {text}: expected FROM:TO:COUNT, COUNT at least 2, or a list of numbers"
        ) from None
    return [value / SWEEPS[sweep.value].scale for value in result]


def _table(outcomes: Sequence[SimulationResult]) -> Table:
    from foretoken.bench.output import figures

    heads = ("ms/token", "over plain", "over SI", "draft busy", "servers busy", "drafted", "wasted", "passes")
    rows = [
        (
            *(one.strategy, f"{1e3 * one.seconds / one.tokens:.2f}", f"{one.over_plain:.2f}x", f"{one.over_si:.2f}x"),
            *(f"{one.drafting:.0%}", f"{one.verifying:.0%}", one.drafted, one.wasted, one.passes),
        )
        for one in outcomes
    ]
    table, best = figures(("strategy", *heads), rows), max(outcomes, key=lambda one: one.over_plain)
    table.rows[outcomes.index(best)].style = "bold green"
    return table


def _gains(result: Sweep) -> Table:
    """Returns a table of speedups over plain decoding by the varied value."""
    from foretoken.bench.output import figures
    from foretoken.plan.simulator import SWEEPS

    scale, unit = SWEEPS[result.by].scale, SWEEPS[result.by].unit
    heads = (unit.strip(), *(f"{one.strategy} over plain" for one in result.outcomes[0]))
    pairs = zip(result.values, result.outcomes, strict=True)
    return figures(
        heads, [(f"{value * scale:g}", *(f"{one.over_plain:.2f}x" for one in each)) for value, each in pairs]
    )


def _whether(outcomes: Sequence[SimulationResult]) -> str:
    from foretoken.plan.simulator import pays, sequential_speedup

    best = pays(outcomes)
    if best is not None:
        gain = best.over_plain / sequential_speedup(outcomes)
        fast = f"{best.strategy} is {best.over_plain:.2f}x plain, {gain:.2f}x the best that waits"
        return f"Pipelining is profitable here: {fast}."
    return "Pipelining is not profitable here: nothing that overlaps drafting and verifying beats the best that waits."


def _where(result: Sweep) -> str:
    """Returns a sentence with the ranges of values in which pipelining is profitable."""
    from foretoken.plan.simulator import SWEEPS, pays

    scale, unit = SWEEPS[result.by].scale, SWEEPS[result.by].unit
    pairs = sorted(zip(result.values, result.outcomes, strict=True), key=lambda pair: pair[0])
    runs = [(here, [value for value, _ in run]) for here, run in groupby(pairs, lambda pair: pays(pair[1]) is not None)]
    spans = [(run[0], run[-1]) for here, run in runs if here]
    low, high = f"{pairs[0][0] * scale:g}", f"{pairs[-1][0] * scale:g}"
    if not spans:
        return f"Pipelining is profitable nowhere from {low} to {high}{unit}."
    if spans == [(pairs[0][0], pairs[-1][0])]:
        return f"Pipelining is profitable everywhere from {low} to {high}{unit}."
    named = " and ".join(f"from {first * scale:g} to {last * scale:g}" for first, last in spans)
    return f"Pipelining is profitable {named}{unit}, of {low} to {high} tried."
