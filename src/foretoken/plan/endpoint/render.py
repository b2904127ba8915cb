"""Output of a plan for a server: the terminal, and a drafter's configuration in the words of each engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from foretoken.plan.endpoint.outcome import OWN, EndpointChoice, EndpointPlan, EndpointRow, Limit
from foretoken.plan.exports import ENGINES, settings
from foretoken.plan.render import comparison_table
from foretoken.probe.server import ServerKind


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
    """Returns the recommendation in sentences."""
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
