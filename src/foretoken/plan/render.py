"""A plan as people read it on a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from foretoken.plan.outcome import Choice, Plan
from foretoken.plan.rows import PlanRow, exports

SHOWN = 3  # predictors named


def rendered(plan: Plan, pastes: Callable[[Plan], Iterator[Text]] | None = None) -> Iterator[Table | Text]:
    """A table for every temperature and batch, the verdicts, and what to paste: for all engines, or ``pastes``."""
    for choice in plan.choices:
        mine = [row for row in plan.rows if (row.temperature, row.batch) == (choice.temperature, choice.batch)]
        yield Text(f"\ntemperature {choice.temperature:g}, batch {choice.batch}", style="bold")
        yield _table(mine)
        yield _verdict(choice)
    yield from _predictors(plan)
    yield from _elsewhere(plan)
    yield from (pastes or _pastes)(plan)


def _table(rows: Sequence[PlanRow]) -> Table:
    """A proposer's best depth in full; beside it the gains of its other depths."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("proposer", overflow="fold")
    for head in ("tokens", "tokens/pass", "interval", "speed-up", "interval", "round ms"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("other depths", style="dim", overflow="fold")
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name]
        top = max(mine, key=lambda row: row.speedup)
        others = "  ".join(f"{r.num_speculative_tokens}: {r.speedup:.2f}x" for r in mine if r is not top)
        style = "bold green" if top.best else "dim" if top.high < 1.0 else None
        table.add_row(
            name, str(top.num_speculative_tokens), f"{top.tokens_per_pass:.2f}",
            _span(top.tokens_per_pass_low, top.tokens_per_pass_high), f"{top.speedup:.2f}x", _span(top.low, top.high),
            f"{top.round_seconds * 1e3:.2f}", others, style=style,
        )  # fmt: skip
    if rows:
        table.add_row("plain", "", "1.00", "", "1.00x", "", f"{rows[0].plain_seconds * 1e3:.2f}", "")
    return table


def _span(low: float, high: float) -> str:
    return "one request" if not math.isfinite(high) else f"{low:.2f}-{high:.2f}"


def _verdict(choice: Choice) -> Text:
    row = choice.row
    if row is None:
        doubt = "" if choice.sure else " (not by much: the interval reaches above 1)"
        return Text(f"do not speculate: nothing is faster than plain decoding{doubt}", style="yellow")
    depth = row.num_speculative_tokens
    text = f"best: {row.name}, {depth} tokens, {row.speedup:.2f}x decoding, {row.end_to_end:.2f}x with the prompt"
    return Text(text if choice.sure else f"{text}; may not pay, the interval reaches below 1",
                style="green" if choice.sure else "yellow")  # fmt: skip


def _predictors(plan: Plan) -> Iterator[Text]:
    for (draft, temperature), found in plan.predictors.items():
        best = [each for each in found if each.name != "constant"][:SHOWN]
        constant = next(each.error for each in found if each.name == "constant")
        named = ", ".join(f"{each.name} to {each.error:.3f}" for each in best)
        yield Text(
            f"\na request's acceptance by {draft} at temperature {temperature:g} is foretold within {constant:.3f} by "
            f"the mean; by {named}",
            style="dim",
        )  # fmt: skip


def _elsewhere(plan: Plan) -> Iterator[Table | Text]:
    """What drafting on another machine would gain, beside drafting here."""
    if not plan.elsewhere:
        return
    yield Text(f"\ndrafting {1e3 * plan.elsewhere[0].rtt:g} ms away, speed-up over plain, simulated", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("draft", overflow="fold")
    table.add_column("temperature", justify="right")
    for way in plan.elsewhere[0].ways:
        table.add_column("here" if way.strategy == "local" else way.strategy, justify="right", no_wrap=True)
    for each in plan.elsewhere:
        told = (f"{way.speedup:.2f}x" + ("" if way.depth is None else f" ({way.depth})") for way in each.ways)
        table.add_row(each.name, f"{each.temperature:g}", *told)
    yield table
    for each in plan.elsewhere:
        yield Text(each.verdict, style="green")


def _pastes(plan: Plan) -> Iterator[Text]:
    config = plan.best
    if config is None:
        yield Text("\nover everything asked about: do not speculate", style="bold yellow")
        return
    forms = exports(config)
    yield Text("\nover everything asked about, paste", style="bold")
    yield Text(f"foretoken     speculative_config={json.dumps(forms['foretoken'])}")
    known = forms["vllm"]
    yield Text("vLLM          " + (f"speculative_config={json.dumps(known)}" if known else "has no such method"))
    for number, line in enumerate((forms["transformers"] or "has no such method").splitlines()):
        yield Text(("transformers  " if number == 0 else " " * 14) + line)
