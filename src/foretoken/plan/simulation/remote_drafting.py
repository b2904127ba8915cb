"""What drafting on another machine would gain: measured times and acceptance, played through by ``simulate``.

The other machine is taken to draft as fast as this one, one target serves one request, and a drafted token's chance is
that of its position since the last of the target's own. What is measured here stays beside it as "local".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.core.checks import number
from foretoken.core.errors import InvalidRequest
from foretoken.plan.rows import PlanRow
from foretoken.plan.simulation.simulate import MARGIN, Setting, simulate

LOCAL = "local"
WAYS = ("si", "dsd", "pearl", "dsi")
MOST = 2  # draft models at each temperature, the fastest here first
TOKENS = 1000  # of the text that is played through


@dataclass(frozen=True, slots=True)
class Way:
    """strategy: ``LOCAL``, as timed, or one of ``WAYS``. depth: tokens drafted before a pass, None where the strategy
    chooses its own. speedup: of decoding over plain decoding here.
    """

    strategy: str
    depth: int | None
    speedup: float


@dataclass(frozen=True, slots=True)
class RemoteDraftingEstimate:
    """One draft model at one temperature, and every way to use it. rtt: seconds there and back."""

    name: str
    temperature: float
    rtt: float
    ways: tuple[Way, ...]

    @property
    def local(self) -> Way:
        return next(way for way in self.ways if way.strategy == LOCAL)

    @property
    def best(self) -> Way:
        """The fastest of those elsewhere."""
        return max((way for way in self.ways if way.strategy != LOCAL), key=lambda way: way.speedup)

    @property
    def verdict(self) -> str:
        """The best choice in one sentence."""
        best, local = self.best, self.local
        there = best.strategy + ("" if best.depth is None else f", {best.depth} tokens")
        where = f"{self.name} at temperature {self.temperature:g}"
        if max(best.speedup, local.speedup) <= 1.0:
            return f"{where}: plain decoding; drafting pays neither here nor {1e3 * self.rtt:g} ms away"
        if best.speedup > MARGIN * local.speedup:
            return f"{where}: draft there ({there}): {best.speedup:.2f}x plain, {local.speedup:.2f}x by drafting here"
        return f"{where}: draft here: {local.speedup:.2f}x plain, {best.speedup:.2f}x at best there ({there})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"best": asdict(self.best), "verdict": self.verdict}


def check(rtt_ms: float | None, batches: Sequence[int]) -> None:
    """Refuse what ``elsewhere`` could not answer, before anything is measured. Raises InvalidRequest."""
    number("--rtt", rtt_ms, 0.0, optional=True)
    if rtt_ms is not None and 1 not in batches:
        raise InvalidRequest("--rtt foretells one request at a time; let 1 be among the batches")
    if rtt_ms is not None:
        simulate(Setting(1.0, 1.0, (0.5,), tokens=1), ("plain",))  # where SimPy is missing, that is said now


def elsewhere(rows: Sequence[PlanRow], rtt: float) -> tuple[RemoteDraftingEstimate, ...]:
    """For every temperature the best draft models that are chains, one request at a time. rtt: seconds."""
    return tuple(
        RemoteDraftingEstimate(chains[0].name, temperature, rtt, tuple(_ways(chains, rtt)))
        for temperature in dict.fromkeys(row.temperature for row in rows)
        for chains in _fastest([row for row in rows if row.temperature == temperature])
    )


def _fastest(rows: Sequence[PlanRow]) -> list[list[PlanRow]]:
    """The rows of each of the best draft models, by depth."""
    found: dict[str, list[PlanRow]] = {}
    for row in rows:
        if row.method == "draft_model" and row.config.get("tree", "chain") == "chain" and row.batch == 1:
            found.setdefault(row.name, []).append(row)
    ordered = sorted(found.values(), key=lambda mine: max(row.speedup for row in mine), reverse=True)
    return [sorted(mine, key=lambda row: row.num_speculative_tokens) for mine in ordered[:MOST]]


def _ways(rows: Sequence[PlanRow], rtt: float) -> Iterator[Way]:
    top = max(rows, key=lambda row: row.speedup)
    yield Way(LOCAL, top.num_speculative_tokens, top.speedup)
    chances = conditional(rows[-1].acceptance)
    for strategy in WAYS:
        own = strategy == "dsd"  # it has a window of its own
        tried = [_played(row, chances, strategy, rtt) for row in (rows[-1:] if own else rows)]
        best = max(tried, key=lambda way: way.speedup)
        yield Way(strategy, None, best.speedup) if own else best


def _played(row: PlanRow, chances: tuple[float, ...], strategy: str, rtt: float) -> Way:
    depth = row.num_speculative_tokens
    target, step = row.round_seconds - row.draft_seconds, row.draft_seconds / depth
    setting = Setting(target, step, chances, depth, rtt=rtt, tokens=TOKENS)
    (outcome,) = simulate(setting, (strategy,))
    return Way(strategy, depth, row.plain_seconds * outcome.tokens / outcome.seconds)


def conditional(acceptance: Sequence[float]) -> tuple[float, ...]:
    """The chance of each position, if those before it were accepted, from the share of rounds that came so far."""
    before, found = 1.0, []
    for share in acceptance:
        if before <= 0.0:
            break
        found.append(min(1.0, share / before))
        before = share
    return tuple(found) or (0.0,)
