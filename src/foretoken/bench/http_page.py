"""The load on a server as a table, and as an offline page with its curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from foretoken.bench.http_load import LoadResult, Percentiles
from foretoken.bench.http_workloads import prefix_speedups
from foretoken.bench.output import figures
from foretoken.report.charts import Axis, Point, Series, lines
from foretoken.report.document import bullets, document, section, table
from foretoken.report.markup import Html

HEADS = (
    *("workload", "at once", "prompt", "cached", "tokens/s", "requests/s"),
    *("TTFT p50 ms", "p99", "ITL p50 ms", "p99", "TPOT p50 ms", "p99", "failed"),
)
_NOTE = (
    "TTFT: seconds to the first text. ITL: between chunks with text, of which each may have several tokens. TPOT: per "
    "token after the first. tokens/s: generated tokens of all requests together."
)


def load_table(results: Sequence[LoadResult]) -> Table:
    """Returns the table of a terminal."""
    return figures(HEADS, map(_cells, results))


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
            section("Figures", table(HEADS, [_cells(result) for result in results])),
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


def _cells(result: LoadResult) -> tuple[str, ...]:
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
