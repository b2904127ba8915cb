"""Results as offline HTML pages and as tables for a terminal: races, the grid, a server under load, costs of a step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from markupsafe import Markup
from rich.table import Table

from foretoken.bench.costs import StepCost
from foretoken.bench.grid import GridCell, Summary
from foretoken.bench.http_load import AGENTS, LoadResult, Percentiles
from foretoken.bench.measure import Startup, StepTimes
from foretoken.bench.output import figures
from foretoken.bench.race import RaceRow, ratios
from foretoken.costs.measured import PassCost, TimeSpread
from foretoken.report.charts import Axis, Bar, Point, Series, bars, lines
from foretoken.report.document import render

NAMES = {"plain": "plain", "draft_model": "draft model", "ngram": "prompt lookup"}
HEADS = (
    *("system", "tokens/s", "spread", "decode tokens/s", "prefill ms", "tokens/pass", "= plain", "memory MB"),
    "sampling bias (z)",
)


def page(setting: Mapping[str, Any], rows: Sequence[RaceRow]) -> str:
    """Returns a complete HTML document without external resources."""
    races: dict[tuple[float, int, str], list[RaceRow]] = {}
    for row in rows:
        races.setdefault((row.temperature, row.batch, row.quantization), []).append(row)
    return render(
        "race.jinja",
        setting,
        races=[
            (
                entrants[0],
                _bars(entrants),
                _claims(entrants),
                _listed(entrants),
                [at for at, row in enumerate(entrants) if row.best],
            )
            for entrants in races.values()
        ],
        heads=HEADS,
    )


def _claims(rows: Sequence[RaceRow]) -> list[str]:
    return [
        f"{ratio['tokens_per_second']:.2f}x {ratio['over']} (decoding alone {ratio['decode_tokens_per_second']:.2f}x)"
        for ratio in ratios(rows)
    ]


def _listed(rows: Sequence[RaceRow]) -> list[tuple[str, ...]]:
    return [(label(row), *cells(row)) for row in rows]


def _bars(rows: Sequence[RaceRow]) -> Markup:
    """Draws one bar per system and method, at its best depth."""
    best = sorted((row for row in rows if row.best), key=lambda row: -row.tokens_per_second)
    return bars("Tokens per second, each at its best depth", [_bar(row) for row in best], "tokens/s")


def _bar(row: RaceRow) -> Bar:
    kind = ("ours" if row.system == "foretoken" else "theirs") + (" plain" if row.method == "plain" else "")
    return Bar(label(row), row.tokens_per_second, *row.tokens_per_second_spread, kind=kind)


def label(row: RaceRow) -> str:
    depth = f", depth {row.num_speculative_tokens}" if row.num_speculative_tokens > 0 else ""
    return f"{row.system} {NAMES.get(row.method, row.method)}{depth}{weights(row)}"


def weights(row: RaceRow) -> str:
    """Returns the row's own weight format in parentheses, if the race names it otherwise."""
    return "" if row.weights.lower() == row.quantization.lower() else f" ({row.weights})"


def cells(row: RaceRow) -> tuple[str, ...]:
    low, high = row.tokens_per_second_spread
    return (
        f"{row.tokens_per_second:.1f}",
        f"{low:.1f}-{high:.1f}",
        f"{row.decode_tokens_per_second:.1f}",
        f"{row.prefill_seconds * 1e3:.0f}",
        f"{row.tokens_per_pass:.2f}",
        "" if row.identical_texts is None else f"{row.identical_texts}/{row.texts}",
        f"{row.resident_bytes / 1e6:.0f}" if row.resident_bytes else "",
        "" if row.sampling_bias_z is None else f"{row.sampling_bias_z:+.1f}",
    )


Results = Mapping[GridCell, Sequence[RaceRow]]
COLUMNS = ("cell", "default", "best fixed", "plain", "best peer", "default / fixed", "/ plain", "/ peer")


def rich_table(results: Results) -> Table:
    """Returns one line per cell, tokens per second and ratios."""
    return figures(COLUMNS, [line(cell, rows) for cell, rows in results.items()])


def line(cell: GridCell, rows: Sequence[RaceRow]) -> tuple[str, ...]:
    """Returns the figures of a cell under ``COLUMNS``."""
    own = Summary.of(rows)
    return (
        cell.name,
        _rate(own.default),
        _named(own.picked),
        _rate(own.plain),
        _named(own.peer),
        *("" if ratio is None else f"{ratio:.2f}" for ratio in (_ratio(own.default, other) for other in own[1:])),
    )


def claims(results: Results) -> list[str]:
    """Returns the median and the lowest ratio of the default over the others."""
    found, summaries = [], list(map(Summary.of, results.values()))
    for at, name in enumerate(("the best fixed configuration", "plain decoding", "the best peer"), start=1):
        ratios = [ratio for own in summaries if (ratio := _ratio(own.default, own[at])) is not None]
        if ratios:
            found.append(
                f"{median(ratios):.2f}x {name} in the median of {len(ratios)} cells, {min(ratios):.2f}x at least"
            )
    return found


def grid_page(setting: Mapping[str, Any], results: Results) -> str:
    """Returns a complete HTML document without external resources: the table, then every cell's rows."""
    return render(
        "grid.jinja",
        setting,
        claims=claims(results),
        columns=COLUMNS,
        lines=[line(*item) for item in results.items()],
        heads=HEADS,
        cells=[(cell.name, _listed(rows)) for cell, rows in results.items()],
    )


def _rate(row: RaceRow | None) -> str:
    return "" if row is None else f"{row.tokens_per_second:.1f}"


def _named(row: RaceRow | None) -> str:
    return "" if row is None else f"{row.tokens_per_second:.1f} ({label(row).removeprefix('foretoken ')})"


def _ratio(row: RaceRow | None, other: RaceRow | None) -> float | None:
    return None if row is None or other is None else row.tokens_per_second / other.tokens_per_second


LOAD_HEADS = (
    *("workload", "at once", "prompt", "cached", "tokens/s", "requests/s"),
    *("TTFT p50 ms", "p99", "ITL p50 ms", "p99", "TPOT p50 ms", "p99", "failed"),
)


def load_table(results: Sequence[LoadResult]) -> Table:
    return figures(LOAD_HEADS, map(_load_cells, results))


def speedup_lines(results: Sequence[LoadResult]) -> list[str]:
    """Returns sentences on the median TTFT of warm agents beside that of cold ones, by concurrency."""
    ttfts: dict[tuple[str, int], list[float]] = {}
    for result in results:
        if result.ttft is not None:
            ttfts.setdefault((result.workload, result.concurrency), []).append(result.ttft.p50)
    ratios = {
        concurrency: median(cold) / median(warm)
        for (name, concurrency), cold in ttfts.items()
        if name == f"{AGENTS}, cold" and (warm := ttfts.get((f"{AGENTS}, warm", concurrency)))
    }
    return [
        f"agents on one beginning, {concurrency} at once: first token {ratio:.1f}x sooner than cold"
        for concurrency, ratio in ratios.items()
    ]


def load_page(setting: Mapping[str, Any], results: Sequence[LoadResult]) -> str:
    """Returns a complete HTML document without external resources."""
    return render(
        "load.jinja",
        setting,
        throughput=_throughput(results),
        first_token=_latency("Time to first token", results, lambda result: result.ttft),
        between=_latency("Time between chunks", results, lambda result: result.itl),
        heads=LOAD_HEADS,
        rows=list(map(_load_cells, results)),
        speedups=speedup_lines(results),
    )


def _throughput(results: Sequence[LoadResult]) -> Markup:
    series = _series(results, lambda result: result.output_tokens_per_second)
    return lines("Generated tokens per second", series, _across(results), Axis("tokens/s", zero=True))


def _latency(title: str, results: Sequence[LoadResult], of: Callable[[LoadResult], Percentiles | None]) -> Markup:
    series = []
    for which in ("p50", "p99"):

        def value(result: LoadResult, which: str = which) -> float | None:
            percentiles = of(result)
            return None if percentiles is None else 1e3 * float(getattr(percentiles, which))

        series += _series(results, value, f" {which}", which == "p50")
    return lines(title, series, _across(results), Axis("ms", log=True))


def _series(
    results: Sequence[LoadResult],
    value: Callable[[LoadResult], float | None],
    suffix: str = "",
    reference: bool = False,
) -> list[Series]:
    series = []
    for name in dict.fromkeys(result.workload for result in results):
        each = [(result.concurrency, value(result)) for result in results if result.workload == name]
        points = tuple(Point(float(at), number) for at, number in each if number is not None)
        series.append(Series(name + suffix, points, reference))
    return series


def _across(results: Sequence[LoadResult]) -> Axis:
    at = tuple(sorted({float(result.concurrency) for result in results}))
    return Axis("concurrent requests", log=True, at=at)


def _load_cells(result: LoadResult) -> tuple[str, ...]:
    times = [ms for each in (result.ttft, result.itl, result.tpot) for ms in _milliseconds(each)]
    return (
        result.workload,
        str(result.concurrency),
        f"{result.prompt_tokens:.0f}",
        f"{result.cached_share:.0%}",
        f"{result.output_tokens_per_second:.1f}",
        f"{result.requests_per_second:.2f}",
        *times,
        str(result.failed or ""),
    )


def _milliseconds(percentiles: Percentiles | None) -> tuple[str, str]:
    return ("", "") if percentiles is None else (f"{1e3 * percentiles.p50:.1f}", f"{1e3 * percentiles.p99:.1f}")


def race_tables(rows: Sequence[RaceRow]) -> Iterator[Table | str]:
    """Yields a table for every temperature, batch and precision, followed by its speedups."""
    for key in dict.fromkeys((row.temperature, row.batch, row.quantization) for row in rows):
        group = [row for row in rows if (row.temperature, row.batch, row.quantization) == key]
        yield f"\ntemperature {key[0]:g}, batch {key[1]}, target in {key[2]}"
        table = figures(("system", "method", "depth", *HEADS[1:]), map(_names_and_cells, group))
        for line, row in zip(table.rows, group, strict=True):
            line.style = "bold" if row.best and row.method != "plain" else None
        yield table
        for ratio in ratios(group):
            yield (
                f"foretoken at its best depth over {ratio['over']}: {ratio['tokens_per_second']:.2f}x end to end, "
                f"{ratio['decode_tokens_per_second']:.2f}x decoding"
            )


def _names_and_cells(row: RaceRow) -> tuple[str, ...]:
    depth = str(row.num_speculative_tokens) if row.num_speculative_tokens > 0 else ""
    name = f"{row.system} {row.version}".strip()
    return name, NAMES.get(row.method, row.method) + weights(row), depth, *cells(row)


def pass_table(costs: Sequence[PassCost]) -> Table:
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


def transformers_table(costs: Sequence[StepCost]) -> Table:
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


def part_table(measured: dict[str, StepTimes]) -> Table:
    """Returns a table of the parts of a decode step, in ms."""
    names = ("target", "draft", "propose", "verify", "commit", "other", "total")
    rows = []
    for label, times in measured.items():
        parts = times.per_step()
        rows.append((label, *(ms(parts[name]) for name in names), f"{times.outside:.1%}"))
    return figures(("steps", *names, "not model passes"), rows)


def startup_table(measured: Sequence[Startup]) -> Table:
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
