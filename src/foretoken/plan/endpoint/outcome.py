"""A plan of a server: a row for every drafter, draft length and concurrency, what to set, and its terminal output."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from foretoken.plan.endpoint.drafters import PredictedDrafter
from foretoken.plan.endpoint.statistics import EndpointAcceptance, PassSeconds, SpeedModel, TokensPerPass
from foretoken.plan.exports import ENGINES, settings
from foretoken.plan.outcome import comparison_table
from foretoken.plan.statistics import around
from foretoken.probe.server import CannotTellError, ServerKind

OWN = "the server's drafter"
_DEEPEST = 16
_WIDEST = 4.0  # ratio of the ends of an interval above which a row says nothing
_CLEARLY = 1.03  # speedup over another draft length that justifies a second one
_UNBOUNDED = 50.0  # half the width of an interval, in the logarithm, that stands for all larger ones


@dataclass(frozen=True, kw_only=True)
class EndpointRow:
    """One prediction, or measurement. Of 100 further runs over as many requests, 95 should lie in the intervals."""

    name: str
    method: str  # "" for the server's own drafter
    config: Mapping[str, Any] | None  # our speculative_config, None for the server's own drafter
    depth: int  # draft length
    concurrency: int  # requests at once
    tokens_per_pass: float  # of a sequence
    tokens_per_pass_low: float
    tokens_per_pass_high: float
    acceptance: tuple[float, ...]  # by position, the fraction of passes that accept that many draft tokens or more
    plain_tokens_per_second: float  # of all sequences without speculation
    speedup: float | None = None  # over plain decoding at the same concurrency; None if a draft's cost is unknown
    low: float | None = None
    high: float | None = None
    tokens_per_second: float | None = None  # of all sequences
    step_seconds: float | None = None  # of a pass with its drafts
    pays_below: float | None = None  # seconds for drafting a token below which it is profitable, if unknown
    measured: bool = False
    best: bool = False  # at its concurrency

    @property
    def gain(self) -> float:
        """The speedup, 0 if it is unknown."""
        return self.speedup or 0.0

    @property
    def vague(self) -> bool:
        """Whether the interval is too wide to say anything."""
        return self.speedup is not None and (self.high or 0.0) > _WIDEST * (self.low or 0.0)


@dataclass(frozen=True, slots=True)
class Limit:
    """Speculation by concurrency. depths: (from, to, draft length) of requests at once; to is None for all above."""

    depths: tuple[tuple[int, int | None, int], ...]

    @classmethod
    def of(cls, depths: Mapping[int, int]) -> "Limit":
        """Returns ranges of equal draft lengths from those by concurrency, which ascends."""
        merged: list[tuple[int, int | None, int]] = []
        start, end = 1, max(depths)
        for depth, group in groupby(depths, key=depths.__getitem__):
            last = max(group)
            merged.append((start, None if last == end else last, depth))
            start = last + 1
        return cls(tuple(merged))

    @property
    def varies(self) -> bool:
        """Whether the draft length depends on the concurrency."""
        return len({depth for _, _, depth in self.depths}) > 1


@dataclass(frozen=True)
class EndpointChoice:
    """The recommendation for all concurrencies together."""

    row: EndpointRow | None  # the fastest, None for no speculation
    limit: Limit  # its draft lengths by concurrency
    off_above: int | None  # requests at once above which speculation should be off, None if beyond the measured ones
    off_low: int | None  # ends of the interval of ``off_above``
    off_high: int | None
    sure: bool  # whether the interval of the speedup lies on one side of 1 at every concurrency


@dataclass(frozen=True)
class EndpointPredictor:
    """Predicts rows from measurements.

    apart: tokens per pass by draft length and concurrency, if they differ from those of all waves together.
    """

    acceptance: Mapping[int, EndpointAcceptance]  # by draft length that was measured
    speeds: SpeedModel
    drafters: Sequence[PredictedDrafter]  # other drafters
    concurrency: Sequence[int]
    apart: Mapping[tuple[int, int], TokensPerPass] = field(default_factory=dict)
    _tokens: dict[int, TokensPerPass] = field(default_factory=dict)

    def rows(self) -> list[EndpointRow]:
        """Returns the rows whose intervals are not too wide, the best of each concurrency marked.

        Raises CannotTellError if the measurements are too uncertain.
        """
        for row in self._all:
            if row.measured and row.vague:
                raise CannotTellError(
                    f"the speedup at {row.concurrency} requests at once is only known to lie between {row.low:.2f} "
                    f"and {row.high:.2f}; give a larger --budget or more --max-tokens"
                )
        clear = [row for row in self._all if not row.vague]
        fastest = {row.concurrency: row for row in sorted(clear, key=lambda row: row.gain) if row.speedup is not None}
        return [replace(row, best=row is fastest.get(row.concurrency) and row.gain > 1.0) for row in clear]

    @property
    def skipped(self) -> str:
        """A note on the rows that are too uncertain, "" if there are none."""
        vague = dict.fromkeys(f"{row.name} with {row.depth} at {row.concurrency}" for row in self._all if row.vague)
        why = f"because the ends of their intervals are more than {_WIDEST:g} times apart"
        return f"skipped, {why}: {', '.join(vague)} at once" if vague else ""

    @cached_property
    def _all(self) -> list[EndpointRow]:
        rows = [self.own(depth, number) for number in self.concurrency for depth in self.depths]
        return rows + [self.other(each, number) for number in self.concurrency for each in self.drafters]

    @property
    def depths(self) -> list[int]:
        """Draft lengths of the rows: up to twice the longest that was measured, or only the measured ones."""
        if any(each.shorter for each in self.acceptance.values()):
            return sorted(self.acceptance)
        return list(range(1, min(_DEEPEST, 2 * max(self.speeds.depths)) + 1))

    def own(self, depth: int, concurrency: int) -> EndpointRow:
        """Returns the row of the server's own drafter."""
        if depth not in self._tokens:
            nearest = min((known for known in self.acceptance if known >= depth), default=max(self.acceptance))
            self._tokens[depth] = self.acceptance[nearest].at(depth)
        tokens = self.apart.get((depth, concurrency), self._tokens[depth])
        spent = self.speeds.pass_with(depth, concurrency)
        drafter = PredictedDrafter(OWN, "", None, depth, tokens, free=True)
        return replace(self._row(drafter, concurrency, spent), measured=spent.tokens is not None)

    def other(self, drafter: PredictedDrafter, concurrency: int) -> EndpointRow:
        verified = self.speeds.free_pass(concurrency * (1.0 + drafter.tokens.drafted), concurrency)
        if drafter.free:
            return self._row(drafter, concurrency, verified)
        left = drafter.tokens.mean * self.speeds.plain_pass(concurrency).seconds - verified.seconds
        return replace(self._row(drafter, concurrency), pays_below=max(0.0, left) / drafter.depth)

    def _row(self, drafter: PredictedDrafter, concurrency: int, spent: PassSeconds | None = None) -> EndpointRow:
        """Returns a row. spent: seconds of a pass, None if the cost of drafting is unknown."""
        tokens, plain = drafter.tokens, self.speeds.plain_pass(concurrency)
        fewest, most = around(tokens.mean, min(_UNBOUNDED, tokens.width))
        row = EndpointRow(
            name=drafter.name,
            method=drafter.method,
            config=drafter.config,
            depth=drafter.depth,
            concurrency=concurrency,
            tokens_per_pass=tokens.mean,
            tokens_per_pass_low=fewest,
            tokens_per_pass_high=most,
            acceptance=tokens.positions,
            plain_tokens_per_second=concurrency / plain.seconds,
        )
        if spent is None:
            return row
        speedup = tokens.mean * plain.seconds / spent.seconds
        width = math.hypot(tokens.width, math.sqrt(2) * spent.width, math.sqrt(2) * plain.width)
        low, high = around(speedup, min(_UNBOUNDED, width))
        return replace(
            row,
            speedup=speedup,
            low=low,
            high=high,
            tokens_per_second=concurrency * tokens.mean / spent.seconds,
            step_seconds=spent.seconds,
        )

    def choice(self, rows: Sequence[EndpointRow]) -> EndpointChoice:
        best, numbers = _overall(rows), self.concurrency
        if best is None:
            surely = all((row.high or 0.0) < 1.0 for row in rows if row.speedup is not None)
            return EndpointChoice(None, Limit.of(dict.fromkeys(numbers, 0)), 0, 0, None, surely)
        if best.config is None:
            limit = Limit.of({number: self._best_depth(rows, number, best.depth) for number in numbers})
            sure = all((self.own(best.depth, number).low or 0.0) > 1.0 for number in numbers)
            return EndpointChoice(best, limit, *self._off(best.depth), sure)
        alike = [row for row in rows if (row.name, row.depth) == (best.name, best.depth)]
        profitable = [row.concurrency for row in alike if row.gain > 1.0]
        above = None if max(numbers) in profitable else max(profitable, default=0)
        limit = Limit.of({number: best.depth if number in profitable else 0 for number in numbers})
        sure = len(alike) == len(numbers) and all((row.low or 0.0) > 1.0 for row in alike)
        return EndpointChoice(best, limit, above, above, None, sure)

    def _off(self, depth: int) -> tuple[int | None, int | None, int | None]:
        """Returns the last concurrency at which the speedup, and the ends of its interval, exceed 1; None if all do."""
        numbers = range(min(self.concurrency), max(self.concurrency) + 1)
        rows = [self.own(depth, number) for number in numbers]

        def last(values: Iterable[float]) -> int | None:
            end = max((number for number, value in zip(numbers, values, strict=True) if value > 1.0), default=0)
            return None if end == numbers[-1] else end

        return last(r.gain for r in rows), last(r.low or 0.0 for r in rows), last(r.high or math.inf for r in rows)

    def _best_depth(self, rows: Sequence[EndpointRow], concurrency: int, usual: int) -> int:
        """Returns the draft length at a concurrency: ``usual`` unless another is clearly faster, 0 if none is."""
        gains = {row.depth: row.gain for row in rows if row.name == OWN and row.concurrency == concurrency}
        depth, top = max(gains.items(), key=lambda item: item[1])
        if top <= 1.0:
            return 0
        return usual if gains.get(usual, 0.0) > max(1.0, top / _CLEARLY) else depth


@dataclass(frozen=True)
class EndpointPlan:
    """Result: a plan, or the reason why there is none."""

    facts: Mapping[str, Any]  # the server and the settings of the measurement
    because: str = ""  # the reason why there is no plan
    notes: tuple[str, ...] = ()  # on omitted rows
    rows: tuple[EndpointRow, ...] = ()
    choice: EndpointChoice | None = None
    paste: tuple[str, ...] = ()  # lines of the engine's configuration
    measured: Mapping[str, Any] | None = None  # points that a later plan at another draft length can use
    predictor: EndpointPredictor | None = None  # computes rows for further draft lengths and concurrencies

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


def _overall(rows: Sequence[EndpointRow]) -> EndpointRow | None:
    """Returns the fastest row of the best drafter and draft length, None if nothing is faster than plain decoding.

    The best has the largest geometric mean of speedups. Speculation can be off at a concurrency where it loses, so that
    a loss counts as 1, and so does a missing row.
    """
    exponent = 1 / len({row.concurrency for row in rows})
    groups: dict[tuple[str, int], list[EndpointRow]] = {}
    for row in rows:
        if row.speedup is not None:
            groups.setdefault((row.name, row.depth), []).append(row)
    scored = [(math.prod(max(1.0, row.gain) for row in group) ** exponent, group) for group in groups.values()]
    score, group = max(scored, key=lambda each: each[0])
    return max(group, key=lambda row: row.gain) if score > 1.0 else None


def rendered(plan: EndpointPlan) -> Iterator[Table | Text]:
    """Yields the notes, a table for every concurrency, the recommendation, and the configuration to paste."""
    for note in plan.notes:
        yield Text(note, style="yellow")
    if plan.because or plan.choice is None:
        yield Text(f"cannot tell, because {plan.because}", style="bold yellow")
        return
    for number in dict.fromkeys(row.concurrency for row in plan.rows):
        yield Text(f"\n{number} at once" if number > 1 else "\none request at a time", style="bold")
        yield _table([row for row in plan.rows if row.concurrency == number])
    for line in verdict_lines(plan.choice, plan.rows):
        yield Text(line, style="green" if plan.choice.sure else "yellow")
    yield Text(f"\npaste ({plan.facts.get('engine')})", style="bold")
    for line in plan.paste:
        yield Text(line)


def verdict_lines(choice: EndpointChoice, rows: Sequence[EndpointRow]) -> list[str]:
    row = choice.row
    if row is None:
        doubt = "" if choice.sure else " (not by much: an interval reaches above 1)"
        return [f"do not speculate: nothing is faster than plain decoding{doubt}"]
    alike = [each for each in rows if (each.name, each.depth) == (row.name, row.depth)]
    gains = ", ".join(f"{each.speedup:.2f}x ({_span(each)}) at {each.concurrency}" for each in alike if each.speedup)
    lines = [f"best over all: {row.name}, {row.depth} draft tokens: {gains} at once"]
    if choice.off_above is not None:
        interval = ""
        if choice.off_low != choice.off_high:
            high = f"to {choice.off_high}" if choice.off_high is not None else "or more"
            interval = f" (the interval is {choice.off_low} {high})"
        lines.append(f"switch it off above {choice.off_above} concurrent requests{interval}")
    elif choice.off_low is not None:
        lines.append(f"it may lose above {choice.off_low} concurrent requests; it gains at all that were measured")
    if choice.limit.varies and row.name == OWN:
        lines.append(f"best draft length by concurrency: {', '.join(map(_range, choice.limit.depths))}")
    if not choice.sure:
        lines.append("an interval reaches below 1: it may be slower than plain decoding")
    return lines


def _range(limit: tuple[int, int | None, int]) -> str:
    first, last, depth = limit
    where = f"from {first} on" if last is None else f"{first} to {last}" if last > first else f"{first}"
    return f"{where}: {depth or 'none'}"


def _table(rows: Sequence[EndpointRow]) -> Table:
    """Each drafter's best draft length in full, and the speedups of its other ones."""
    table = comparison_table("drafter", "tokens/s", "other draft lengths (* measured)")
    for name in dict.fromkeys(row.name for row in rows):
        alike = [row for row in rows if row.name == name]
        top = max(alike, key=lambda row: (row.gain, row.pays_below or 0.0))
        others = "  ".join(_short(row) for row in alike if row is not top)
        table.add_row(*_cells(top), others, style="bold green" if top.best else None)
    table.add_row("plain*", "", "1.00", "", "1.00x", "", f"{rows[0].plain_tokens_per_second:,.1f}", "")
    return table


def _cells(row: EndpointRow) -> tuple[str, ...]:
    tokens = f"{row.tokens_per_pass_low:.2f}-{row.tokens_per_pass_high:.2f}"
    mark = "*" if row.measured else ""
    first = (row.name, f"{row.depth}{mark}", f"{row.tokens_per_pass:.2f}", tokens)
    if row.speedup is None:
        below = (
            f"profitable below {1e3 * (row.pays_below or 0.0):.1f} ms a draft token"
            if row.pays_below
            else "never profitable"
        )
        return (*first, "cannot tell", below, "")
    return (*first, f"{row.speedup:.2f}x", _span(row), f"{row.tokens_per_second or 0.0:,.1f}")


def _short(row: EndpointRow) -> str:
    mark = "*" if row.measured else ""
    return f"{row.depth}{mark}: {row.speedup:.2f}x" if row.speedup else f"{row.depth}: {row.tokens_per_pass:.2f} a pass"


def _span(row: EndpointRow) -> str:
    return f"{row.low:.2f}-{row.high:.2f}" if row.low and row.high and math.isfinite(row.high) else "unknown"


def paste(
    kind: str, config: Mapping[str, Any] | None, depth: int, limit: Limit, current: Mapping[str, Any]
) -> list[str]:
    """Returns lines of an engine's configuration. depth: 0 to switch speculation off.

    config: a speculative_config of ours for another drafter, None to keep the server's ``current`` one.
    """
    keys = dict(config or current)
    match kind:
        case ServerKind.VLLM:
            return _vllm(keys, depth, limit)
        case ServerKind.LLAMACPP:
            return _options("llamacpp", "--spec-type none", keys, depth)
        case ServerKind.SGLANG:
            return _options("sglang", "# leave the --speculative-* options out", keys, depth)
        case ServerKind.FORETOKEN:
            return _json(keys | {"num_speculative_tokens": depth}) if depth else _json({"method": "none"})
        case _:
            return [f"draft length {depth}" if depth else "no speculation"]


def _vllm(keys: dict[str, Any], depth: int, limit: Limit) -> list[str]:
    if not depth:
        return ["# leave --speculative-config out"]
    keys["num_speculative_tokens"] = depth
    if limit.varies:
        ranges = [[first, end if end is not None else 1_000_000, size] for first, end, size in limit.depths]
        keys["num_speculative_tokens"] = max(size for _, _, size in ranges)
        keys["num_speculative_tokens_per_batch_size"] = ranges
    return _json(keys)


def _json(keys: Mapping[str, Any]) -> list[str]:
    hint = [] if "method" in keys else ["# beside the method and model that the server has now"]
    return [*hint, f"--speculative-config '{json.dumps(keys)}'"]


def _options(engine: str, off: str, keys: Mapping[str, Any], depth: int) -> list[str]:
    """Returns options of llama.cpp or SGLang. off: the line that switches speculation off."""
    if not depth:
        return [off]
    if line := settings(engine, keys, depth):
        return [line]
    forms = ENGINES[engine]
    if method := keys.get("method"):
        return [f"# {forms.name} has no method {method!r}"]
    length = " ".join(forms.length).format(depth=depth, rows=depth + 1)
    return ["# beside the algorithm and draft that the server has now", length]
