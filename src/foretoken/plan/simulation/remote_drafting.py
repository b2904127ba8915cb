"""Speedup of drafting on another machine: measured times and acceptance in the simulator (``simulate``).

The other machine is assumed to draft as fast as this one, one target serves one request, and the acceptance of a draft
token depends on its position since the last token of the target's own. The speedup measured here is listed as "local".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.core.checks import number
from foretoken.core.errors import InvalidRequest
from foretoken.plan.rows import PlanRow
from foretoken.plan.simulation.simulate import MARGIN, simulate
from foretoken.plan.simulation.strategies import Setting

LOCAL = "local"
STRATEGIES = ("si", "dsd", "pearl", "dsi")
MAX_DRAFTS = 2  # draft models at each temperature, the fastest here first
TOKENS = 1000  # tokens of the simulated text


@dataclass(frozen=True, slots=True)
class DraftingOption:
    """One way to use a draft model."""

    strategy: str  # ``LOCAL``, as timed, or one of ``STRATEGIES``
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
        """Drafting here."""
        return next(option for option in self.options if option.strategy == LOCAL)

    @property
    def best(self) -> DraftingOption:
        """The fastest option with the draft on the other machine."""
        return max((option for option in self.options if option.strategy != LOCAL), key=lambda option: option.speedup)

    @property
    def verdict(self) -> str:
        """The recommendation in one sentence."""
        best, local = self.best, self.local
        there = best.strategy + ("" if best.depth is None else f", {best.depth} tokens")
        where = f"{self.name} at temperature {self.temperature:g}"
        if max(best.speedup, local.speedup) <= 1.0:
            return f"{where}: plain decoding; drafting is profitable neither here nor {1e3 * self.rtt:g} ms away"
        if best.speedup > MARGIN * local.speedup:
            return f"{where}: draft there ({there}): {best.speedup:.2f}x plain, {local.speedup:.2f}x by drafting here"
        return f"{where}: draft here: {local.speedup:.2f}x plain, {best.speedup:.2f}x at best there ({there})"

    def to_dict(self) -> dict[str, Any]:
        """Returns the estimate for JSON."""
        return asdict(self) | {"best": asdict(self.best), "verdict": self.verdict}


def check_rtt(rtt_ms: float | None, batches: Sequence[int]) -> None:
    """Checks, before anything is measured, that ``remote_drafting`` can answer.

    Raises:
        InvalidRequest: The round trip is negative, no batch is 1, or SimPy is not installed.
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
    for strategy in STRATEGIES:
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
