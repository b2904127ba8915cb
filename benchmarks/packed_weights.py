"""bfloat16 weights in 12 bits against raw ones: time of a pass by rows, memory and load time, in turns.

Both models are loaded in this process, and their passes alternate. Logits are compared bit for bit on the way.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from foretoken.bench.clock import TimedTask, interleaved
from foretoken.bench.setting import cores, setting, wide_console
from foretoken.cli.files import publish
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Handle, Model
from foretoken.models.formats.memory import give_back
from foretoken.models.loading import load_model
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.train.widen.checkpoint import scaled

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


def score(model: Model, handle: Handle, draft: Draft, logits: dict[str, torch.Tensor], name: str) -> None:
    with torch.inference_mode():
        logits[name] = model.score([handle], [draft])[0].logits


def passes(models: dict[str, Model], rows: Sequence[int], context: int, turns: int) -> list[dict[str, Any]]:
    """Returns for each number of rows the median seconds by format, their ratio, and whether logits are bit-equal."""
    prompt = [(7 * i) % 1000 + 1 for i in range(context)]
    handles = {name: model.open(prompt) for name, model in models.items()}
    result = []
    for count in rows:
        draft = Draft.chain(list(range(1, count))) if count > 1 else Draft.empty()
        logits: dict[str, torch.Tensor] = {}
        tasks = {
            name: TimedTask(
                partial(score, model, handles[name], draft, logits, name),
                partial(model.commit, [handles[name]], [()]),
            )
            for name, model in models.items()
        }
        spreads = interleaved(tasks, turns)
        medians = {name: spread.median for name, spread in spreads.items()}
        same = torch.equal(logits["raw"].view(torch.int32), logits["packed"].view(torch.int32))
        ratio = medians["raw"] / medians["packed"]
        result.append({"rows": count, "seconds": medians, "raw_over_packed": ratio, "same_bits": same})
    return result


def main(
    model: Annotated[Path | None, typer.Option(help="A checkpoint. [the bundled target, widened to 0.7b]")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Rows of a pass. [1 2 4 8 12 16 24 34]")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 512,
    turns: Annotated[int, typer.Option(min=1, help="Passes of each kind, in turns.")] = 15,
    loads: Annotated[int, typer.Option(min=0, help="Timed loads of each format.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the JSON document to a file.")] = None,
) -> None:
    """Time passes and loading with packed and raw weights in turns, and weigh them."""
    torch.set_num_threads(cores())
    path = model or scaled("0.7b")
    load = load_seconds(path, loads) if loads else {}
    pairs = {name: opened(path, name) for name in FORMATS}
    held = {name: runner.weight_bytes for name, (_, runner) in pairs.items()}
    timed = passes(
        {name: pair[0] for name, pair in pairs.items()}, rows or [1, 2, 4, 8, 12, 16, 24, 34], context, turns
    )
    record = {
        "setting": setting() | {"model": path.name},
        "weight_bytes": held,
        "load_seconds": load,
        "passes": timed,
    }

    def show() -> None:
        table = Table("rows", "raw, ms", "packed, ms", "raw / packed", "same bits", box=box.SIMPLE)
        for row in timed:
            seconds = (f"{row['seconds'][name] * 1e3:.1f}" for name in FORMATS)
            table.add_row(str(row["rows"]), *seconds, f"{row['raw_over_packed']:.2f}", str(row["same_bits"]))
        console = wide_console()
        console.print(table)
        share = held["packed"] / held["raw"]
        console.print(
            f"weights {held['raw'] / 1e6:.0f} MB raw, {held['packed'] / 1e6:.0f} MB packed, {share:.3f} of it"
        )
        if load:
            longer = load["packed"] / load["raw"]
            console.print(f"loading {load['raw']:.2f} s raw, {load['packed']:.2f} s packed, {longer:.2f} times")

    publish(record, show, as_json, output)
    if not all(row["same_bits"] for row in timed):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
