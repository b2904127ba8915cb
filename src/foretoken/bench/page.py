"""Results as offline HTML pages and as tables for a terminal: races, the table of benchmarks, a server under load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from foretoken.bench.grid import GridCell, Summary
from foretoken.bench.http_load import LoadResult, Percentiles, prefix_speedups
from foretoken.bench.output import figures
from foretoken.bench.race import RaceRow, ratios
from foretoken.report.charts import Axis, Bar, Point, Series, bars, lines
from foretoken.report.document import Html, bullets, document, folded, join, paragraph, section, table

NAMES = {"plain": "plain", "draft_model": "draft model", "ngram": "prompt lookup"}
HEADS = (
    *("system", "tokens/s", "spread", "decode tokens/s", "prefill ms", "tokens/pass", "= plain", "memory MB"),
    "sampling bias (z)",
)


def page(setting: Mapping[str, Any], rows: Sequence[RaceRow]) -> str:
    """Returns a complete HTML document without external resources."""
    races = list(dict.fromkeys((row.temperature, row.batch, row.quantization) for row in rows))
    return document(
        "Tokens per second, with and without speculation",
        [_race([row for row in rows if (row.temperature, row.batch, row.quantization) == key]) for key in races],
        setting,
        lead=f"{setting.get('processor', '')}, {setting.get('cores', '?')} cores, {setting.get('date', '')}. Systems "
        "took turns in one run, all others stopped; bars are medians, whiskers the lowest and the highest repeat. "
        "Machines differ and drift: only ratios within this page are claims.",
        footer="tokens/s includes prefill, decode tokens/s does not. tokens/pass: emitted tokens over "
        "target passes. = plain: texts that are token for token the same system's plain decoding. memory: resident, "
        "with the files that are mapped. sampling bias (z): how far sampled texts are from the target's distribution, "
        "in standard errors (exact ones stay within 3). Bold: the fastest depth.",
    )


def _race(rows: Sequence[RaceRow]) -> Html:
    first = rows[0]
    claims = bullets(
        f"{ratio['tokens_per_second']:.2f}x {ratio['over']} (decoding alone {ratio['decode_tokens_per_second']:.2f}x)"
        for ratio in ratios(rows)
    )
    return section(
        f"Temperature {first.temperature:g}, batch {first.batch}, target in {first.quantization}",
        _bars(rows),
        join(paragraph("Foretoken at its best depth, over"), claims) if claims else "",
        table(
            HEADS,
            [(label(row), *cells(row)) for row in rows],
            best=[at for at, row in enumerate(rows) if row.best],
        ),
    )


def _bars(rows: Sequence[RaceRow]) -> Html:
    """Draws one bar per system and method, at its best depth."""
    best = sorted((row for row in rows if row.best), key=lambda row: -row.tokens_per_second)
    return bars("Tokens per second, each at its best depth", [_bar(row) for row in best], "tokens/s")


def _bar(row: RaceRow) -> Bar:
    kind = ("ours" if row.system == "foretoken" else "theirs") + (" plain" if row.method == "plain" else "")
    return Bar(label(row), row.tokens_per_second, *row.tokens_per_second_spread, kind=kind)


def label(row: RaceRow) -> str:
    """Returns the display name of a row."""
    depth = f", depth {row.num_speculative_tokens}" if row.num_speculative_tokens > 0 else ""
    return f"{row.system} {NAMES.get(row.method, row.method)}{depth}{weights(row)}"


def weights(row: RaceRow) -> str:
    """Returns the row's own weight format in parentheses, if the race names it otherwise."""
    return "" if row.weights.lower() == row.quantization.lower() else f" ({row.weights})"


def cells(row: RaceRow) -> tuple[str, ...]:
    """Returns the figures of a row as the tables print them."""
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
        *("" if ratio is None else f"{ratio:.2f}" for ratio in (_ratio(own.default, other) for other in own.others)),
    )


def claims(results: Results) -> list[str]:
    """Returns the median and the lowest ratio of the default over the others."""
    found, summaries = [], list(map(Summary.of, results.values()))
    for at, name in enumerate(("the best fixed configuration", "plain decoding", "the best peer")):
        ratios = [ratio for own in summaries if (ratio := _ratio(own.default, own.others[at])) is not None]
        if ratios:
            found.append(
                f"{median(ratios):.2f}x {name} in the median of {len(ratios)} cells, {min(ratios):.2f}x at least"
            )
    return found


def grid_page(setting: Mapping[str, Any], results: Results) -> str:
    """Returns a complete HTML document without external resources: the table, then every cell's rows."""
    every = [
        folded(cell.name, table(HEADS, [(label(row), *cells(row)) for row in rows])) for cell, rows in results.items()
    ]
    return document(
        "Benchmarks in one table",
        [
            section(
                "Tokens per second", bullets(claims(results)), table(COLUMNS, [line(*item) for item in results.items()])
            ),
            section("Every system of every cell", join(*every)),
        ],
        setting,
        lead=f"{setting.get('processor', '')}, {setting.get('cores', '?')} cores, {setting.get('date', '')}. The "
        "default is what a user gets without a key. The best fixed configuration and the best peer are the fastest of "
        "those that ran. "
        "Systems took turns within a cell; figures are medians, prefill included.",
        footer="Only ratios within a cell are claims: machines drift between cells.",
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
_NOTE = (
    "TTFT: seconds to the first text. ITL: between chunks with text, of which each may have several tokens. TPOT: per "
    "token after the first. tokens/s: generated tokens of all requests together."
)


def load_table(results: Sequence[LoadResult]) -> Table:
    """Returns the table of a terminal."""
    return figures(LOAD_HEADS, map(_load_cells, results))


def speedup_lines(results: Sequence[LoadResult]) -> list[str]:
    """Returns sentences on the speedup of a shared beginning."""
    return [
        f"agents on one beginning, {concurrency} at once: first token {ratio:.1f}x sooner than cold"
        for concurrency, ratio in prefix_speedups(list(results)).items()
    ]


def load_page(setting: Mapping[str, Any], results: Sequence[LoadResult]) -> str:
    """Returns a complete HTML document without external resources."""
    return document(
        "A server under load",
        [
            section("Throughput", _throughput(results)),
            section("Time to first token", _latency("Time to first token", results, lambda result: result.ttft)),
            section("Inter-token latency", _latency("Time between chunks", results, lambda result: result.itl)),
            section("Figures", table(LOAD_HEADS, [_load_cells(result) for result in results])),
            section("Shared beginning", bullets(speedup_lines(results))) if speedup_lines(results) else "",
        ],
        setting,
        lead=f"{setting.get('processor', '')}, {setting.get('cores', '?')} cores, {setting.get('date', '')}.",
        footer=_NOTE,
    )


def _throughput(results: Sequence[LoadResult]) -> Html:
    series = _series(results, lambda result: result.output_tokens_per_second)
    return lines("Generated tokens per second", series, _across(results), Axis("tokens/s", zero=True))


def _latency(title: str, results: Sequence[LoadResult], of: Callable[[LoadResult], Percentiles | None]) -> Html:
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
