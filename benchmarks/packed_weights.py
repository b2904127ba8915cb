"""bfloat16 weights in 12 bits against raw ones: time of a pass by rows, memory and load time, in turns.

Both models are loaded in this process, and their passes alternate. Logits are compared bit for bit on the way.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from foretoken.bench.output import figures, report
from foretoken.bench.setting import cores
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Model
from foretoken.models.formats.memory import give_back
from foretoken.models.loading import load_model
from foretoken.models.runners.native.runner import NativeRunner
from kernels import pass_times
from options import AsJson, Output, Target, Turns, target_path

FORMATS = ("raw", "packed")


def opened(path: Path, weight_format: str) -> tuple[Model, NativeRunner]:
    """Returns a model and its compiled runner."""
    model = load_model(path, "bfloat16", "cpu", "native", weight_format=weight_format)
    runner = getattr(model, "runner", None)
    if not isinstance(runner, NativeRunner):
        raise InvalidRequest("the compiled kernels do not run here; weights are held raw")
    return model, runner


def load_seconds(path: Path, turns: int) -> dict[str, float]:
    """Returns the median seconds of loading by format; the first load of each, which reads the disk, does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in FORMATS}
    for turn in range(turns + 1):
        for name in FORMATS if turn % 2 else reversed(FORMATS):
            started = perf_counter()
            loaded = opened(path, name)
            if turn:
                seconds[name].append(perf_counter() - started)
            del loaded
            give_back()
    return {name: statistics.median(values) for name, values in seconds.items()}


def main(
    model: Target = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Rows of a pass. [1 2 4 8 12 16 24 34]")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 512,
    turns: Turns = 15,
    loads: Annotated[int, typer.Option(min=0, help="Timed loads of each format.")] = 3,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Time passes and loading with packed and raw weights in turns, and weigh them."""
    torch.set_num_threads(cores())
    path = target_path(model)
    load = load_seconds(path, loads) if loads else {}
    pairs = {name: opened(path, name) for name in FORMATS}
    held = {name: runner.weight_bytes for name, (_, runner) in pairs.items()}
    models = {name: pair[0] for name, pair in pairs.items()}
    timed = pass_times(models, rows or [1, 2, 4, 8, 12, 16, 24, 34], context, turns)
    for row in timed:
        row["raw_over_packed"] = row["seconds"]["raw"] / row["seconds"]["packed"]
    cells = [
        (
            *(row["rows"], *(f"{row['seconds'][name] * 1e3:.1f}" for name in FORMATS)),
            *(f"{row['raw_over_packed']:.2f}", row["same_bits"]),
        )
        for row in timed
    ]
    parts: list[Any] = [figures(("rows", "raw, ms", "packed, ms", "raw / packed", "same bits"), cells)]
    sizes = {name: f"{size / 1e6:.0f} MB {name}" for name, size in held.items()}
    parts.append(f"weights {sizes['raw']}, {sizes['packed']}, {held['packed'] / held['raw']:.3f} of it")
    if load:
        longer = load["packed"] / load["raw"]
        parts.append(f"loading {load['raw']:.2f} s raw, {load['packed']:.2f} s packed, {longer:.2f} times")
    record = {"weight_bytes": held, "load_seconds": load, "passes": timed}
    report(parts, {"model": path.name}, output, as_json, **record)
    if not all(row["same_bits"] for row in timed):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
