"""An encoder-decoder that repairs code: plain, speculative, and transformers' assisted generation, in a race.

    python benchmarks/encoder_decoder.py --count 4 --repeats 2 --depth 6 --depth 12 --batch 1

Tokens per second from the prompt to the last token, the encoder's pass included. Every system generates as many tokens
as the expected output has (of a batch, its shortest), so that none is faster by ending early. Only ours has batches:
transformers drafts for one sequence. Beside them, passes of the decoder alone and their lower bound: the same matrix
products alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track

from foretoken import zoo
from foretoken.bench.costs import Loaded, pass_costs
from foretoken.bench.output import cores, report
from foretoken.bench.page import pass_table, race_tables
from foretoken.bench.peers.registry import PEERS
from foretoken.bench.peers.worker import start
from foretoken.bench.race import Config, Pairing, RaceRow, RaceTask, own, peers, race, ratios
from foretoken.bench.workloads import Repair, repairs
from foretoken.models.formats.checkpoint import resolve
from foretoken.train.widen.checkpoint import scaled
from options import Output


def configs(draft: Path) -> list[Config]:
    """Returns our ways to speculate."""
    model = {"method": "draft_model", "model": str(draft)}
    mixture = {"method": "mixture", "members": [model, {"method": "prediction"}]}
    return [{"method": "draft_model"}, {"method": "ngram"}, {"method": "prediction"}, mixture]


def task_of(repairs: Sequence[Repair], batch: int, temperature: float) -> RaceTask:
    groups = [repairs[at : at + batch] for at in range(0, len(repairs), batch)]
    prompts = [[list(each.source) for each in group] for group in groups]
    return RaceTask(prompts, [min(each.length for each in group) for group in groups], temperature)


def rows(
    pairing: Pairing, tasks: Sequence[Repair], batches: Sequence[int], temperature: float, repeats: int, peer: bool
) -> Iterator[RaceRow]:
    """Yields the rows of a race for each batch size."""
    assert pairing.draft is not None
    for batch in batches:
        here = replace(pairing, batch=batch)
        entrants = own(here, configs(pairing.draft))
        if peer and batch == 1:
            raw = peers(replace(here, quantization=""), [{"method": "draft_model"}], [PEERS["transformers"]], print)
            entrants += [replace(e, setup=replace(e.setup, quantization=pairing.quantization)) for e in raw]
        progress = lambda order: track(order, "turns", transient=True)  # noqa: E731
        yield from race(entrants, [task_of(tasks, batch, temperature)], repeats, start, print, progress)[0]


def main(
    target: Annotated[str | None, typer.Option(help="Folder or hub name. [the bundled one, widened]")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder or hub name. [the bundled one]")] = None,
    like: Annotated[str, typer.Option(help="How far the bundled target is widened.")] = "t5-large",
    count: Annotated[int, typer.Option(min=1, max=32, help="Tasks.")] = 8,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    depth: Annotated[list[int], typer.Option(help="Tokens to draft, repeatable.")] = [4, 8],
    batch: Annotated[list[int], typer.Option(help="Texts at once, repeatable.")] = [1, 8],
    temperature: float = 0.0,
    pass_rows: Annotated[list[int], typer.Option(help="Rows of passes that are timed, repeatable.")] = [1, 8],
    turns: Annotated[int, typer.Option(min=1, help="Timings of each pass.")] = 20,
    dtype: str = "bfloat16",
    quantization: Annotated[str, typer.Option(help="int8, of our target.")] = "",
    peer: Annotated[bool, typer.Option(help="transformers beside ours.")] = True,
    output: Output = None,
) -> None:
    """Races repairs of code by an encoder-decoder, and times its passes."""
    torch.set_num_threads(cores())
    big = resolve(target) if target else scaled(like, "seq2seq-target")
    small = resolve(draft) if draft else zoo.path("seq2seq-draft")
    costs = pass_costs(Loaded.of(big, quantization), pass_rows, [64], turns)
    tasks = repairs(big, count)
    longest = 32 + max(len(task.source) + task.length for task in tasks)
    pairing = Pairing(big, small, tuple(depth), quantization=quantization, max_length=longest, dtype=dtype)
    result = list(rows(pairing, tasks, batch, temperature, repeats, peer))
    report(
        [*race_tables(result), pass_table(costs)],
        {"target": str(big), "draft": str(small), "tasks": len(tasks), "temperature": temperature},
        output,
        rows=[asdict(row) for row in result],
        passes=[{**asdict(cost), "over_floor": cost.over_floor} for cost in costs],
        ratios=ratios([row for row in result if row.batch == 1]),
    )


if __name__ == "__main__":
    typer.run(main)
