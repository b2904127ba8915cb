"""Overhead of choosing drafts: CPU microseconds per step in the draft policy and its cost model.

    python benchmarks/deciding.py --output deciding.json

Two proposers for the bundled target: its draft model, which is profitable, and the target itself, which never is, so
that nothing is drafted. Each batch of requests runs to its end; the first repeat is not counted.
"""

from __future__ import annotations

import time
from itertools import cycle, islice
from typing import Annotated, Any

import torch
import typer

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.clock import Stopwatch
from foretoken.bench.output import figures, report
from foretoken.bench.setting import cores
from foretoken.bench.workloads import FUNCTIONS
from foretoken.propose.auto import AUTO
from options import Output, Repeats


def measure(llm: LLM, batch: int, tokens: int, repeats: int) -> dict[str, float]:
    """Returns the microseconds per step of choosing, and of the whole step, and the drafted tokens per request."""
    controller: Any = llm.engine.controller
    policy = llm.proposer_of(AUTO).policy  # type: ignore[attr-defined]
    prompts = list(islice(cycle(FUNCTIONS), batch))
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    llm.generate(prompts, params)
    parts = [(controller, "budgets"), (controller, "observe"), (controller.costs, "observe")]
    parts += [(policy, name) for name in ("searched", "keep", "lengths", "settle", "learn")]
    with Stopwatch(parts, time.thread_time) as deciding:
        started = time.perf_counter()
        outputs = [output for _ in range(repeats) for output in llm.generate(prompts, params)]
        seconds = time.perf_counter() - started
    steps = deciding.calls["budgets"]
    return {
        "deciding_us": deciding.seconds / steps * 1e6,
        "step_us": seconds / steps * 1e6,
        "drafted": sum(output.outputs[0].stats.drafted for output in outputs) / steps / batch,
    }


def main(
    batch: Annotated[list[int], typer.Option(help="Requests at once; may be repeated.")] = [1, 4, 16],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a request.")] = 96,
    repeats: Repeats = 4,
    output: Output = None,
) -> None:
    """Microseconds per step of choosing drafts, beside the whole step."""
    torch.set_num_threads(cores())
    rows: list[dict[str, Any]] = []
    for name, draft in (("draft model", zoo.path("draft")), ("target as its own draft", zoo.path("target"))):
        llm = LLM(draft_model=draft)
        rows += [{"proposer": name, "batch": size, **measure(llm, size, tokens, repeats)} for size in batch]
        llm.close()
    cells = [
        (
            *(row["proposer"], row["batch"], f"{row['drafted']:.1f}", f"{row['deciding_us']:.0f}"),
            f"{row['deciding_us'] / row['step_us']:.1%}",
        )
        for row in rows
    ]
    heads = ("proposer", "batch", "drafted per step and request", "deciding, µs per step", "fraction of a step")
    report([figures(heads, cells)], {"tokens": tokens, "repeats": repeats}, output, rows=rows)


if __name__ == "__main__":
    typer.run(main)
