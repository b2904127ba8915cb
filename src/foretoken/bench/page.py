"""The race as one HTML page that opens offline: bars, every row, and the setting it was measured in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from foretoken.bench.race import Row, ratios

WIDTH, LABEL, BAR, GAP = 860, 250, 20, 8  # of the drawing, in its own units
NAMES = {"plain": "plain", "draft_model": "draft model", "ngram": "prompt lookup"}

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #667; --paper: #fff; --line: #dde; --ours: #2563eb;
  --theirs: #94a3b8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --dim: #9aa3b2; --paper: #14171c; --line: #2c323b;
  --ours: #60a5fa; --theirs: #64748b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 900px;
  margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; } p.note, footer { color: var(--dim); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
.scroll { overflow-x: auto; } th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--dim); font-weight: 500; } .name { text-align: left; } tr.best td { font-weight: 600; }
svg { width: 100%; min-width: 600px; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
svg .ours { fill: var(--ours); } svg .theirs { fill: var(--theirs); } svg .plain { opacity: .55; }
svg line { stroke: var(--ink); stroke-width: 1.5; } code { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dt { color: var(--dim); }
dd { margin: 0; }
"""


def page(setting: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """A whole document, nothing fetched from anywhere."""
    races = list(dict.fromkeys((row.temperature, row.batch, row.quantization) for row in rows))
    parts = [_race([row for row in rows if (row.temperature, row.batch, row.quantization) == key]) for key in races]
    facts = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{_fact(name, value)}</dd>" for name, value in setting.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>Foretoken: the race</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Tokens per second, with and without speculation</h1>
<p class="note">{escape(str(setting.get("processor", "")))}, {escape(str(setting.get("cores", "?")))} cores,
{escape(str(setting.get("date", "")))}. Systems took turns in one run, all others asleep; bars are medians, whiskers the
lowest and the highest repeat. Machines differ and drift: only ratios within this page are claims.</p>
{"".join(parts)}
<h2>Setting</h2>
<dl>{facts}</dl>
<footer><p>tokens/s holds the prompt's pass, decode tokens/s leaves it out. tokens/pass: emitted tokens over target
passes. = plain: texts that are token for token the same system's plain decoding. law z: how far drawn texts are from
the target's law, in standard errors (exact ones stay within 3). Bold: the depth that was fastest.</p></footer>
</body>
</html>
"""


def _race(rows: Sequence[Row]) -> str:
    first = rows[0]
    title = f"Temperature {first.temperature:g}, batch {first.batch}, target in {first.quantization}"
    best = sorted((row for row in rows if row.best), key=lambda row: -row.tokens_per_second)
    claims = "".join(
        f"<li>{ratio['tokens_per_second']:.2f}x {escape(ratio['over'])} "
        f"(decoding alone {ratio['decode_tokens_per_second']:.2f}x)</li>"
        for ratio in ratios(rows)
    )
    said = f"<p>Foretoken at its best depth, over</p><ul>{claims}</ul>" if claims else ""
    return f'<h2>{title}</h2><div class="scroll">{_bars(best)}</div>{said}<div class="scroll">{_table(rows)}</div>'


def _bars(rows: Sequence[Row]) -> str:
    """One bar a system and method, at its best depth."""
    top = max((row.tokens_per_second_spread[1] for row in rows), default=1.0) or 1.0
    scale = (WIDTH - LABEL - 70) / top
    height = len(rows) * (BAR + GAP)
    shapes: list[str] = []
    for at, row in enumerate(rows):
        y, middle = at * (BAR + GAP), at * (BAR + GAP) + BAR / 2
        low, high = (LABEL + edge * scale for edge in row.tokens_per_second_spread)
        kind = ("ours" if row.system == "foretoken" else "theirs") + (" plain" if row.method == "plain" else "")
        shapes.append(
            f'<text x="{LABEL - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(label(row))}</text>'
            f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{row.tokens_per_second * scale:.1f}" height="{BAR}"/>'
            f'<line x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}"/>'
            f'<text x="{high + 8:.1f}" y="{middle + 4:.1f}">{row.tokens_per_second:.1f}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="tokens per second">{"".join(shapes)}</svg>'


def label(row: Row) -> str:
    """A row's name as people read it."""
    depth = f", depth {row.num_speculative_tokens}" if row.num_speculative_tokens else ""
    return f"{row.system} {NAMES.get(row.method, row.method)}{depth}"


def _table(rows: Sequence[Row]) -> str:
    heads = ("tokens/s", "spread", "decode tokens/s", "prefill ms", "tokens/pass", "= plain", "law z")
    head = '<th class="name">system</th>' + "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(
        f'<tr class="{"best" if row.best else ""}"><td class="name">{escape(label(row))}</td>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def cells(row: Row) -> tuple[str, ...]:
    """The figures of a row as the tables print them."""
    low, high = row.tokens_per_second_spread
    return (
        f"{row.tokens_per_second:.1f}",
        f"{low:.1f}-{high:.1f}",
        f"{row.decode_tokens_per_second:.1f}",
        f"{row.prefill_seconds * 1e3:.0f}",
        f"{row.tokens_per_pass:.2f}",
        "" if row.identical_texts is None else f"{row.identical_texts}/{row.texts}",
        "" if row.law_z is None else f"{row.law_z:+.1f}",
    )


def _fact(name: str, value: Any) -> str:
    text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
    return f"<code>{escape(text)}</code>" if name == "command" else escape(text)
