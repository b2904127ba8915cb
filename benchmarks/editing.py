"""An edit of code that is in the prompt: tokens per second of each method beside plain decoding.

    python benchmarks/editing.py --config '{"method": "suffix", "num_speculative_tokens": 24}' --output editing.json

Tasks are the editing part of the stream of ``systems.py``, so every system generates the same text. Steps that hold a
prompt do not count. Proposers are rebuilt in each turn, so that none has the last turn's outputs in its store.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from foretoken.bench.output import figures, report
from foretoken.bench.setting import cores
from foretoken.models.formats.checkpoint import resolve
from options import Output, target_path
from systems import Totals, compare, fixed_engine, forced_builder, tasks

PLAIN = '{"method": "none"}'


def main(
    target: Annotated[str | None, typer.Option(help="Folder or hub name. [bundled target]")] = None,
    config: Annotated[list[str], typer.Option(help="A speculative_config as JSON; may be repeated.")] = [
        '{"method": "ngram", "num_speculative_tokens": 16}',
        '{"method": "suffix", "num_speculative_tokens": 24}',
        '{"method": "prediction", "num_speculative_tokens": 16}',
        '{"method": "prediction", "num_speculative_tokens": 32}',
    ],
    turns: Annotated[int, typer.Option(min=1)] = 3,
    count: Annotated[int, typer.Option("--tasks", min=1, max=8, help="Number of edits.")] = 8,
    dtype: str = "auto",
    device: str = "auto",
    quantization: Annotated[str | None, typer.Option(help="Quantization of the models, such as int8.")] = None,
    output: Output = None,
) -> None:
    """Races plain decoding and each configuration over the edits."""
    torch.set_num_threads(cores())
    path = resolve(target) if target is not None else target_path(None, small=True)
    builder = forced_builder(path, dtype=dtype, device=device, quantization=quantization)
    edits = [task for task in tasks(builder.tokenizer, (), count, 0) if task.part == "editing"]
    runs: dict[str, list[Totals]] = defaultdict(list)
    for _ in track(range(turns), "turns", transient=True):
        engines = {text: fixed_engine(builder, json.loads(text)) for text in (PLAIN, *config)}
        for cell in compare(engines, edits, 1, decode_only=True):
            if cell.part == "stream":
                runs[cell.system].append(cell.totals)
    plain, rows, records = sum(runs[PLAIN], Totals()), list[tuple[str, ...]](), list[dict[str, Any]]()
    for text, measured in runs.items():
        total, options, speeds = sum(measured, Totals()), json.loads(text), sorted(run.speed for run in measured)
        ratio, steps = total.speed / plain.speed, total.passes
        label = " ".join(f"{key}={value}" if key != "method" else str(value) for key, value in options.items())
        spread, drafted = f"{speeds[0]:.0f}-{speeds[-1]:.0f}", f"{total.drafted / steps:.1f}"
        rows.append((label, f"{total.speed:.0f}", spread, f"{ratio:.2f}", f"{total.tokens_per_pass:.2f}", drafted))
        mean = replace(total, seconds=total.seconds / turns)
        records.append({"config": options, "tokens_per_second": total.speed, "ratio": ratio, **vars(mean)})
    heads = ("method", "tokens/s", "low-high", "plain = 1", "tokens per step", "drafted per step")
    report([figures(heads, rows)], {"target": str(path), "turns": turns, "tasks": len(edits)}, output, rows=records)


if __name__ == "__main__":
    typer.run(main)
