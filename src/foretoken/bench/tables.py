"""Tables of figures for a terminal or Markdown."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from foretoken.bench.costs import StepCost
from foretoken.bench.measure import Startup, StepTimes
from foretoken.bench.output import figures
from foretoken.bench.page import HEADS, NAMES, cells, weights
from foretoken.bench.race import RaceRow, ratios
from foretoken.costs.measured import PassCost, TimeSpread


def race(rows: Sequence[RaceRow]) -> Iterator[Table | str]:
    """Yields a table for every temperature, batch and precision, followed by its speedups."""
    for key in dict.fromkeys((row.temperature, row.batch, row.quantization) for row in rows):
        group = [row for row in rows if (row.temperature, row.batch, row.quantization) == key]
        yield f"\ntemperature {key[0]:g}, batch {key[1]}, target in {key[2]}"
        table = figures(("system", "method", "depth", *HEADS[1:]), map(_named, group))
        for line, row in zip(table.rows, group, strict=True):
            line.style = "bold" if row.best and row.method != "plain" else None
        yield table
        for ratio in ratios(group):
            yield (
                f"foretoken at its best depth over {ratio['over']}: {ratio['tokens_per_second']:.2f}x end to end, "
                f"{ratio['decode_tokens_per_second']:.2f}x decoding"
            )


def _named(row: RaceRow) -> tuple[str, ...]:
    depth = str(row.num_speculative_tokens) if row.num_speculative_tokens > 0 else ""
    name = f"{row.system} {row.version}".strip()
    return name, NAMES.get(row.method, row.method) + weights(row), depth, *cells(row)


def passes(costs: Sequence[PassCost]) -> Table:
    """Returns a table with one line per context and row count."""
    first = {cost.context: cost.seconds.median for cost in reversed(costs)}
    return figures(
        ("context", "rows", "ms", "spread", "x first", "limit ms", "x limit", "x limit and KV", "KV MB"),
        [
            (
                *(cost.context, cost.rows, ms(cost.seconds.median), _spread(cost.seconds)),
                f"{cost.seconds.median / first[cost.context]:.2f}",
                ms(cost.floor.median) if cost.floor else "",
                *(_times(cost.over_floor), _times(cost.over_read), f"{cost.kv_bytes / 1e6:.1f}"),
            )
            for cost in costs
        ],
    )


def transformers(costs: Sequence[StepCost]) -> Table:
    """Returns a table that compares a pass over one row with transformers'."""
    return figures(
        ("model", "context", "ours ms", "spread", "transformers ms", "spread", "ratio"),
        [
            (
                *(cost.name, cost.context, ms(cost.foretoken.median), _spread(cost.foretoken)),
                *(ms(cost.transformers.median), _spread(cost.transformers), f"{cost.ratio:.2f}"),
            )
            for cost in costs
        ],
    )


def breakdown(measured: dict[str, StepTimes]) -> Table:
    """Returns a table of the parts of a decode step, in ms."""
    names = ("target", "draft", "propose", "verify", "commit", "other", "total")
    rows = []
    for label, times in measured.items():
        parts = times.per_step()
        rows.append((label, *(ms(parts[name]) for name in names), f"{times.outside:.1%}"))
    return figures(("steps", *names, "not model passes"), rows)


def startups(measured: Sequence[Startup]) -> Table:
    """Returns a table of seconds to the first token, and memory."""
    return figures(
        ("model", "start to first token s", "spread", "peak MB", "of it imports MB"),
        [
            (
                *(start.name, f"{start.seconds:.2f}", f"{start.low:.2f}-{start.high:.2f}"),
                *(f"{start.peak_bytes / 1e6:.0f}", f"{start.imported_bytes / 1e6:.0f}"),
            )
            for start in measured
        ],
    )


def ms(seconds: float) -> str:
    """Formats milliseconds with three significant digits."""
    value = seconds * 1e3
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _spread(spread: TimeSpread) -> str:
    return f"{ms(spread.low)}-{ms(spread.high)}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
