"""A plan of a server as data: a row for every drafter, draft length and concurrency, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from foretoken.plan.endpoint.acceptance import CannotTellError, EndpointAcceptance, TokensPerPass
from foretoken.plan.endpoint.drafters import PredictedDrafter
from foretoken.plan.endpoint.engines import Limit, ranges
from foretoken.plan.endpoint.speeds import PassSeconds, SpeedModel

OWN = "the server's drafter"
_DEEPEST = 16
_WIDEST = 4.0  # ratio of the ends of an interval from which it tells nothing
_CLEARLY = 1.03  # speedup over another draft length that is worth a second one


@dataclass(frozen=True, kw_only=True)
class EndpointRow:
    """One prediction, or measurement.

    Intervals are for further runs over as many requests: 95 of 100 should lie inside.

    Attributes:
        name: Name of the drafter.
        method: Its speculative method, "" for the server's own.
        config: Our speculative_config of it, None for the server's own.
        depth: Draft length.
        concurrency: Requests at once.
        tokens_per_pass: Tokens of a sequence in a pass.
        tokens_per_pass_low: Lower end of its interval.
        tokens_per_pass_high: Upper end.
        acceptance: Share of passes that accept so many draft tokens or more, by position.
        speedup: Of decoding over plain decoding at the same concurrency; None if a draft's cost is not known.
        low: Lower end of its interval.
        high: Upper end.
        tokens_per_second: Of all sequences together.
        plain_tokens_per_second: The same without speculation.
        step_seconds: Of a pass with its drafts.
        pays_below: Seconds for drafting a token below which it pays, where the cost is not known.
        measured: Whether it was measured.
        best: Whether it is the fastest at its concurrency.
    """

    name: str
    method: str
    config: Mapping[str, Any] | None
    depth: int
    concurrency: int
    tokens_per_pass: float
    tokens_per_pass_low: float
    tokens_per_pass_high: float
    acceptance: tuple[float, ...]
    plain_tokens_per_second: float
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    pays_below: float | None = None
    measured: bool = False
    best: bool = False


@dataclass(frozen=True)
class EndpointChoice:
    """What to set for all concurrencies together.

    Attributes:
        row: The fastest over them, None for no speculation.
        limit: Its draft lengths by concurrency.
        off_above: Requests at once above which speculation should be off, None if it gains at all that were measured.
        off_low: Lower end of its interval.
        off_high: Upper end, None if it is beyond what was measured.
        sure: Whether the interval of the speedup lies on one side of 1 at every concurrency.
    """

    row: EndpointRow | None
    limit: Limit
    off_above: int | None
    off_low: int | None
    off_high: int | None
    sure: bool


@dataclass(frozen=True)
class EndpointPredictor:
    """Predicts rows from what was measured.

    Attributes:
        acceptance: By draft length that was measured.
        speeds: Seconds of passes.
        drafters: Other drafters.
        concurrency: Requests at once.
        apart: Tokens per pass by draft length and concurrency, where they are not those of all waves together.
    """

    acceptance: Mapping[int, EndpointAcceptance]
    speeds: SpeedModel
    drafters: Sequence[PredictedDrafter]
    concurrency: Sequence[int]
    apart: Mapping[tuple[int, int], TokensPerPass] = field(default_factory=dict)
    _tokens: dict[int, TokensPerPass] = field(default_factory=dict)

    def rows(self) -> list[EndpointRow]:
        """Returns the rows that tell something, the best of each concurrency marked.

        Raises:
            CannotTellError: What was measured is too uncertain.
        """
        for row in self._all:
            if row.measured and _vague(row):
                raise CannotTellError(
                    f"the speedup at {row.concurrency} requests at once is only known to lie between {row.low:.2f} "
                    f"and {row.high:.2f}; give a larger --budget or more --max-tokens"
                )
        return list(_marked([row for row in self._all if not _vague(row)]))

    @property
    def left_out(self) -> str:
        """Says which rows are left out, "" if none is."""
        vague = dict.fromkeys(f"{row.name} with {row.depth} at {row.concurrency}" for row in self._all if _vague(row))
        why = f"because the ends of their intervals are more than {_WIDEST:g} times apart"
        return f"left out, {why}: {', '.join(vague)} at once" if vague else ""

    @cached_property
    def _all(self) -> list[EndpointRow]:
        made = [self.own(depth, number) for number in self.concurrency for depth in self.depths]
        return made + [self.other(each, number) for number in self.concurrency for each in self.drafters]

    @property
    def depths(self) -> list[int]:
        """Draft lengths that are told: up to twice the longest that was measured, or only those that were."""
        if any(each.shorter for each in self.acceptance.values()):
            return sorted(self.acceptance)
        return list(range(1, min(_DEEPEST, 2 * max(self.speeds.depths)) + 1))

    def own(self, depth: int, concurrency: int) -> EndpointRow:
        """Returns the row of the server's own drafter."""
        if depth not in self._tokens:
            nearest = min((own for own in self.acceptance if own >= depth), default=max(self.acceptance))
            self._tokens[depth] = self.acceptance[nearest].at(depth)
        tokens = self._tokens[depth]
        spent = self.speeds.pass_with(depth, concurrency)
        tokens = self.apart.get((depth, concurrency), tokens)
        row = self._row(OWN, "", None, depth, concurrency, tokens)
        return self._timed(row, tokens, spent)

    def other(self, drafter: PredictedDrafter, concurrency: int) -> EndpointRow:
        """Returns the row of another drafter."""
        tokens = drafter.tokens
        row = self._row(drafter.name, drafter.method, drafter.config, drafter.depth, concurrency, tokens)
        rows = concurrency * (1.0 + tokens.drafted)
        if drafter.free:
            return self._timed(row, tokens, self.speeds.free_pass(rows, concurrency))
        plain, verified = self.speeds.plain_pass(concurrency), self.speeds.free_pass(rows, concurrency)
        left = tokens.mean * plain.seconds - verified.seconds
        return replace(row, pays_below=max(0.0, left) / drafter.depth)

    def speedup(self, depth: int, concurrency: int) -> tuple[float, float, float]:
        """Returns the speedup of the server's drafter at any concurrency, with its interval."""
        row = self.own(depth, concurrency)
        return row.speedup or 0.0, row.low or 0.0, row.high or math.inf

    def choice(self, rows: Sequence[EndpointRow]) -> EndpointChoice:
        """Returns what to set."""
        best = _overall(rows)
        if best is None:
            return EndpointChoice(None, ranges([(n, 0) for n in self.concurrency]), 0, 0, None, _surely_not(rows))
        if best.config is not None:
            own = [row for row in rows if (row.name, row.depth) == (best.name, best.depth)]
            paying = [row.concurrency for row in own if (row.speedup or 0.0) > 1.0]
            last = max(paying, default=0)
            off = None if last == max(self.concurrency) else last
            limit = ranges([(number, best.depth if number in paying else 0) for number in self.concurrency])
            sure = len(own) == len(self.concurrency) and all((row.low or 0.0) > 1.0 for row in own)
            return EndpointChoice(best, limit, off, off, None, sure)
        ends = self._off(best.depth)
        by_number = [(number, self._best_depth(rows, number, best.depth)) for number in self.concurrency]
        sure = all((self.own(best.depth, number).low or 0.0) > 1.0 for number in self.concurrency)
        return EndpointChoice(best, ranges(by_number), ends[0], ends[1], ends[2], sure)

    def _off(self, depth: int) -> list[int | None]:
        """Returns the last concurrency up to which the speedup, and the ends of its interval, exceed 1; None if all."""
        known = range(min(self.concurrency), max(self.concurrency) + 1)
        speedups = {number: self.speedup(depth, number) for number in known}
        lasts = [max((n for n, each in speedups.items() if each[at] > 1.0), default=0) for at in range(3)]
        return [None if last == max(known) else last for last in lasts]

    def _best_depth(self, rows: Sequence[EndpointRow], concurrency: int, usual: int) -> int:
        """Returns the draft length at a concurrency: ``usual`` unless another is clearly faster, 0 if none gains."""
        own = {row.depth: row.speedup or 0.0 for row in rows if row.name == OWN and row.concurrency == concurrency}
        depth, top = max(own.items(), key=lambda item: item[1])
        if top <= 1.0:
            return 0
        return usual if own.get(usual, 0.0) > max(1.0, top / _CLEARLY) else depth

    def _row(
        self,
        name: str,
        method: str,
        config: Mapping[str, Any] | None,
        depth: int,
        concurrency: int,
        tokens: TokensPerPass,
    ) -> EndpointRow:
        return EndpointRow(
            name=name,
            method=method,
            config=config,
            depth=depth,
            concurrency=concurrency,
            tokens_per_pass=tokens.mean,
            tokens_per_pass_low=tokens.mean * math.exp(-tokens.width),
            tokens_per_pass_high=tokens.mean * math.exp(min(50.0, tokens.width)),
            acceptance=tokens.positions,
            plain_tokens_per_second=concurrency / self.speeds.plain_pass(concurrency).seconds,
        )

    def _timed(self, row: EndpointRow, tokens: TokensPerPass, spent: PassSeconds) -> EndpointRow:
        plain = self.speeds.plain_pass(row.concurrency)
        speedup = tokens.mean * plain.seconds / spent.seconds
        off = math.hypot(tokens.width, math.sqrt(2) * spent.width, math.sqrt(2) * plain.width)
        return replace(
            row,
            speedup=speedup,
            low=speedup * math.exp(-off),
            high=speedup * math.exp(min(50.0, off)),
            tokens_per_second=row.concurrency * tokens.mean / spent.seconds,
            step_seconds=spent.seconds,
            measured=spent.tokens is not None and row.config is None,
        )


@dataclass(frozen=True)
class EndpointPlan:
    """Result: a plan, or why there is none.

    Attributes:
        facts: The server and how it was measured.
        because: Why nothing can be told, "" if there is a plan.
        notes: What is left out, and why.
        rows: Predictions.
        choice: What to set.
        paste: Lines of the engine's configuration.
        measured: Points that a later plan at another draft length can use.
        predictor: Computes rows for further draft lengths and concurrencies.
    """

    facts: Mapping[str, Any]
    because: str = ""
    notes: tuple[str, ...] = ()
    rows: tuple[EndpointRow, ...] = ()
    choice: EndpointChoice | None = None
    paste: tuple[str, ...] = ()
    measured: Mapping[str, Any] | None = None
    predictor: EndpointPredictor | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan for JSON and HTML pages."""
        return {
            "outcome": "cannot tell" if self.because else "plan",
            "because": self.because or None,
            "notes": list(self.notes),
            "setting": dict(self.facts),
            "choice": None if self.choice is None else asdict(self.choice),
            "paste": list(self.paste),
            "rows": [asdict(row) for row in self.rows],
            "measured": self.measured,
        }


def _vague(row: EndpointRow) -> bool:
    return row.speedup is not None and (row.high or 0.0) > _WIDEST * (row.low or 0.0)


def _marked(rows: Sequence[EndpointRow]) -> Iterator[EndpointRow]:
    timed = [row for row in rows if row.speedup is not None]
    fastest = {row.concurrency: row for row in sorted(timed, key=lambda row: row.speedup or 0.0)}
    for row in rows:
        yield replace(row, best=row is fastest.get(row.concurrency) and (row.speedup or 0.0) > 1.0)


def _overall(rows: Sequence[EndpointRow]) -> EndpointRow | None:
    """Returns a row of the drafter and draft length with the largest geometric mean of speedups, plain where it loses.

    Speculation can be off where it loses, so that a loss there counts as 1, and so does a concurrency without a row.
    None if nothing gains anywhere.
    """
    share = 1 / len({row.concurrency for row in rows})
    groups: dict[tuple[str, int], list[EndpointRow]] = {}
    for row in rows:
        if row.speedup is not None:
            groups.setdefault((row.name, row.depth), []).append(row)
    scored = [(math.prod(max(1.0, row.speedup or 0.0) for row in own) ** share, own) for own in groups.values()]
    score, own = max(scored, key=lambda each: each[0])
    return max(own, key=lambda row: row.speedup or 0.0) if score > 1.0 else None


def _surely_not(rows: Sequence[EndpointRow]) -> bool:
    return all((row.high or 0.0) < 1.0 for row in rows if row.speedup is not None)
