"""Overhead of choosing draft lengths: CPU microseconds per step in the controller and its cost model.

    python benchmarks/deciding.py --output deciding.json

Two proposers for the bundled target: its draft model, which pays off, and the target itself, which never does, so that
nothing is drafted. Each batch of requests runs to its end; the first repeat is not counted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.setting import cores, setting, wide_console
from foretoken.bench.workloads import FUNCTIONS


class Timed:
    """Wraps a function and sums the CPU seconds spent in it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.seconds, self.calls = call, 0.0, 0

    def __call__(self, *args: Any) -> Any:
        started = time.thread_time()
        try:
            return self.call(*args)
        finally:
            self.seconds += time.thread_time() - started
            self.calls += 1


def measure(llm: LLM, batch: int, tokens: int, repeats: int) -> dict[str, float]:
    """Returns the microseconds per step of choosing, and of the whole step, and the drafted tokens per request."""
    controller: Any = llm.engine.controller
    prompts = list(islice(cycle(FUNCTIONS), batch))
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    llm.generate(prompts, params)
    parts = [(controller, "budgets"), (controller, "observe"), (controller.costs, "observe")]
    timed = [Timed(getattr(owner, name)) for owner, name in parts]
    for (owner, name), timer in zip(parts, timed, strict=True):
        setattr(owner, name, timer)
    drafted = 0
    started = time.perf_counter()
    for _ in range(repeats):
        outputs = llm.generate(prompts, params)
        drafted += sum(output.outputs[0].stats.drafted for output in outputs)
    seconds = time.perf_counter() - started
    for owner, name in parts:
        delattr(owner, name)
    steps = timed[0].calls
    return {
        "deciding_us": sum(timer.seconds for timer in timed) / steps * 1e6,
        "step_us": seconds / steps * 1e6,
        "drafted": drafted / steps / batch,
    }


def main(
    batch: Annotated[list[int], typer.Option(help="Requests at once; may be repeated.")] = [1, 4, 16],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a request.")] = 96,
    repeats: Annotated[int, typer.Option(min=1)] = 4,
    json_file: Annotated[Path | None, typer.Option("--output", help="Write setting and rows here.")] = None,
) -> None:
    """Microseconds per step of choosing draft lengths, beside the whole step."""
    torch.set_num_threads(cores())
    rows: list[dict[str, Any]] = []
    for name, draft in (("draft model", zoo.path("draft")), ("target as its own draft", zoo.path("target"))):
        llm = LLM(draft_model=draft)
        rows += [{"proposer": name, "batch": size, **measure(llm, size, tokens, repeats)} for size in batch]
        llm.close()
    table = Table(box=box.MARKDOWN)
    for column in ("proposer", "batch", "drafted per step and request", "deciding, µs per step", "share of a step"):
        table.add_column(column, justify="left" if column == "proposer" else "right")
    for row in rows:
        share = row["deciding_us"] / row["step_us"]
        cells = (f"{row['drafted']:.1f}", f"{row['deciding_us']:.0f}", f"{share:.1%}")
        table.add_row(str(row["proposer"]), str(row["batch"]), *cells)
    console = wide_console()
    console.print(table)
    facts = setting() | {"tokens": tokens, "repeats": repeats}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    if json_file is not None:
        json_file.write_text(json.dumps({"setting": facts, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
