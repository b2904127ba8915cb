"""Tokens per second on the bundled pair, the target widened to the size of a real model, beside transformers.

Systems take turns within each repeat, in another order each time, so that a machine that drifts drifts for all.
Only ratios within one run are claims.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretoken import zoo
from foretoken.bench.workloads import FUNCTIONS, load_prompts
from foretoken.train.scale_up import scaled
from setting import cores, setting, wide_console
from systems import Sample, System, foretoken_systems, transformers_systems

WARM_UP = 8  # tokens


@dataclass(frozen=True)
class Row:
    """Medians over the repeats. ``identical_to_plain`` is None where texts are drawn afresh."""

    system: str
    method: str
    num_speculative_tokens: int
    temperature: float
    batch: int
    tokens_per_second: float
    tokens_per_second_spread: tuple[float, float]
    decode_tokens_per_second: float
    tokens_per_pass: float
    identical_to_plain: bool | None
    identical_texts: int | None
    texts: int


def measure(system: System, prompts: Sequence[str], max_tokens: int) -> list[Sample]:
    """One repeat of one system."""
    return [system.run(prompt, max_tokens) for prompt in prompts]


def summarise(system: System, temperature: float, repeats: list[list[Sample]], plain: list[Sample] | None) -> Row:
    """A row from all repeats of one system; ``plain`` is the same system without speculation."""
    rates = [sum(len(s.tokens) for s in run) / sum(s.seconds for s in run) for run in repeats]
    decode = [
        sum(len(s.tokens) - s.first_tokens for s in run) / max(1e-9, sum(s.seconds - s.first_seconds for s in run))
        for run in repeats
    ]
    every = [sample for run in repeats for sample in run]
    same = None
    if plain is not None and temperature == 0:
        same = sum(all(run[i].tokens == p.tokens for run in repeats) for i, p in enumerate(plain))
    return Row(
        system=system.system,
        method=system.method,
        num_speculative_tokens=system.depth,
        temperature=temperature,
        batch=1,
        tokens_per_second=median(rates),
        tokens_per_second_spread=(min(rates), max(rates)),
        decode_tokens_per_second=median(decode),
        tokens_per_pass=sum(len(s.tokens) for s in every) / sum(s.passes for s in every),
        identical_to_plain=None if same is None else same == len(repeats[0]),
        identical_texts=same,
        texts=len(repeats[0]),
    )


def race(
    systems: Sequence[System],
    prompts: Sequence[str],
    max_tokens: int,
    temperature: float,
    repeats: int,
    console: Console,
) -> list[Row]:
    """All systems, interleaved. -> one row each"""
    for system in systems:
        system.run(prompts[0], WARM_UP)
    samples: dict[str, list[list[Sample]]] = {system.label: [] for system in systems}
    turns = [systems[(i + r) % len(systems)] for r in range(repeats) for i in range(len(systems))]
    for system in track(turns, f"temperature {temperature:g}", console=console):
        samples[system.label].append(measure(system, prompts, max_tokens))
    return [
        summarise(system, temperature, samples[system.label], samples.get(f"{system.system} plain", [None])[0])
        for system in systems
    ]


def show(rows: Sequence[Row], console: Console) -> None:
    """A table, and the ratios that are claimed."""
    for temperature in dict.fromkeys(row.temperature for row in rows):
        mine = [row for row in rows if row.temperature == temperature]
        console.print(f"\ntemperature {temperature:g}")
        table = Table(box=box.MARKDOWN)
        for head in ("system", "method", "depth", "tokens/s", "spread", "decode tokens/s", "tokens/pass", "= plain"):
            table.add_column(head, justify="left" if head in ("system", "method") else "right")
        for row in mine:
            low, high = row.tokens_per_second_spread
            same = "" if row.identical_texts is None else f"{row.identical_texts}/{row.texts}"
            table.add_row(
                row.system, row.method, str(row.num_speculative_tokens or ""), f"{row.tokens_per_second:.1f}",
                f"{low:.1f}-{high:.1f}", f"{row.decode_tokens_per_second:.1f}", f"{row.tokens_per_pass:.2f}", same,
            )  # fmt: skip
        console.print(table)
        for name, ratio in ratios(mine).items():
            console.print(f"{name}: {ratio:.2f}x")


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """The draft model at its best depth against plain decoding and against transformers with the same pair."""

    def best(system: str, method: str) -> float | None:
        rates = [r.tokens_per_second for r in rows if (r.system, r.method) == (system, method)]
        return max(rates, default=None)

    ours = best("foretoken", "draft_model")
    against = {
        "draft model, best depth, over own plain decoding": best("foretoken", "plain"),
        "draft model, best depth, over transformers assisted at its best depth": best("transformers", "draft_model"),
        "draft model, best depth, over transformers plain": best("transformers", "plain"),
    }
    return {name: ours / other for name, other in against.items() if ours and other}


def main(
    prompts: Annotated[Path | None, typer.Option(help='JSON lines with a "prompt" each. [our own functions]')] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts to take from the start.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=2)] = 96,
    temperature: Annotated[list[float], typer.Option(help="May be repeated.")] = [0.0],
    depth: Annotated[list[int], typer.Option(help="Tokens drafted per round; may be repeated.")] = [2, 4, 6, 8],
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    like: Annotated[str, typer.Option(help="Size the bundled target is widened to; none: as it is.")] = "0.7b",
    target: Annotated[Path | None, typer.Option(help="Another target, taken as it is.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Its draft.")] = None,
    peers: Annotated[bool, typer.Option(help="Race transformers too.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write setting and rows here.")] = None,
) -> None:
    """Race plain decoding, our proposers and transformers' assisted generation, batch 1, bf16."""
    torch.set_num_threads(cores())
    console = wide_console()
    texts = (load_prompts(prompts) if prompts else list(FUNCTIONS))[:count]
    wide = target or (zoo.path("target") if like == "none" else scaled(like))
    small = draft or zoo.path("draft")
    rows: list[Row] = []
    for value in temperature:
        systems = foretoken_systems(wide, small, depth, value)
        if peers:
            systems += transformers_systems(wide, small, depth, value)
        rows += race(systems, texts, max_tokens, value, repeats, console)
        del systems
    facts = setting() | {"target": wide.name, "draft": small.name, "prompts": len(texts), "max_tokens": max_tokens,
                         "repeats": repeats}  # fmt: skip
    show(rows, console)
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    if json_file is not None:
        record: dict[str, Any] = {"setting": facts, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
