"""Tables of figures for a terminal or Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from foretoken.bench.costs import StepCost
from foretoken.bench.page import NAMES, cells, weights
from foretoken.bench.race import RaceRow, ratios
from foretoken.bench.startup import Startup
from foretoken.bench.step_times import StepTimes
from foretoken.costs.measured import PassCost, TimeSpread


def race(rows: Sequence[RaceRow]) -> Iterator[Table | str]:
    """Yields a table for every temperature, batch and precision, followed by its speedups."""
    for key in dict.fromkeys((row.temperature, row.batch, row.quantization) for row in rows):
        group = [row for row in rows if (row.temperature, row.batch, row.quantization) == key]
        yield f"\ntemperature {key[0]:g}, batch {key[1]}, target in {key[2]}"
        heads = (
            "depth",
            "tokens/s",
            "spread",
            "decode tokens/s",
            "prefill ms",
            "tokens/pass",
            "= plain",
            "memory MB",
            "sampling bias (z)",
        )
        table = _table(("system", "method"), heads)
        for row in group:
            depth = str(row.num_speculative_tokens) if row.num_speculative_tokens > 0 else ""
            name = f"{row.system} {row.version}".strip()
            style = "bold" if row.best and row.method != "plain" else None
            table.add_row(name, NAMES.get(row.method, row.method) + weights(row), depth, *cells(row), style=style)
        yield table
        for ratio in ratios(group):
            yield (
                f"foretoken at its best depth over {ratio['over']}: {ratio['tokens_per_second']:.2f}x end to end, "
                f"{ratio['decode_tokens_per_second']:.2f}x decoding"
            )


def passes(costs: Sequence[PassCost]) -> Table:
    """Returns a table with one line per context and row count."""
    heads = ("context", "rows", "ms", "spread", "x first", "floor ms", "x floor", "x floor and KV", "KV MB")
    table = _table((), heads)
    first = {cost.context: cost.seconds.median for cost in reversed(costs)}
    for cost in costs:
        table.add_row(
            str(cost.context),
            str(cost.rows),
            ms(cost.seconds.median),
            _spread(cost.seconds),
            f"{cost.seconds.median / first[cost.context]:.2f}",
            ms(cost.floor.median) if cost.floor else "",
            _times(cost.over_floor),
            _times(cost.over_read),
            f"{cost.kv_bytes / 1e6:.1f}",
        )
    return table


def transformers(costs: Sequence[StepCost]) -> Table:
    """Returns a table that compares a pass over one row with transformers'."""
    table = _table(("model",), ("context", "ours ms", "spread", "transformers ms", "spread", "ratio"))
    for cost in costs:
        table.add_row(
            cost.name,
            str(cost.context),
            ms(cost.foretoken.median),
            _spread(cost.foretoken),
            ms(cost.transformers.median),
            _spread(cost.transformers),
            f"{cost.ratio:.2f}",
        )
    return table


def breakdown(measured: dict[str, StepTimes]) -> Table:
    """Returns a table of the parts of a decode step, in ms."""
    names = ("target", "draft", "propose", "verify", "commit", "other", "total")
    table = _table(("steps",), (*names, "not model passes"))
    for label, times in measured.items():
        parts = times.per_step()
        table.add_row(label, *(ms(parts[name]) for name in names), f"{times.outside:.1%}")
    return table


def startups(measured: Sequence[Startup]) -> Table:
    """Returns a table of seconds to the first token, and memory."""
    table = _table(("model",), ("start to first token s", "spread", "peak MB", "of it imports MB"))
    for each in measured:
        table.add_row(
            each.name,
            f"{each.seconds:.2f}",
            f"{each.low:.2f}-{each.high:.2f}",
            f"{each.peak_bytes / 1e6:.0f}",
            f"{each.imported_bytes / 1e6:.0f}",
        )
    return table


def ms(seconds: float) -> str:
    """Formats milliseconds with three significant digits."""
    value = seconds * 1e3
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=box.MARKDOWN)
    for head in left:
        table.add_column(head)
    for head in right:
        table.add_column(head, justify="right")
    return table


def _spread(spread: TimeSpread) -> str:
    return f"{ms(spread.low)}-{ms(spread.high)}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
