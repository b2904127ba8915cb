"""The race as one offline HTML page: bars, every row, and the setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.bench.race import RaceRow, ratios
from foretoken.report.charts import Bar, bars
from foretoken.report.document import bullets, document, paragraph, section, table
from foretoken.report.markup import Html, join

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
    """Returns how the row's system stores the target, in parentheses, if not as the race names it."""
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
