"""A mixed stream of requests: the goodput controller beside every proposer at every fixed draft length.

    python benchmarks/adaptive.py --output adaptive.json
    python benchmarks/adaptive.py --crowd 0

With several proposers, given by repeated ``--speculative-config``, the adaptive system is their mixture, under the
controller that a mixture has by default.

Parts, whose requests alternate: completion, editing and repetition as in ``mixture.py`` (greedy, the output of the last
two is forced) and completion at a high temperature, all one at a time; and batches of ``--crowd`` completions at once.
Every request goes through all systems, which take turns of a few steps; figures are total tokens over total seconds.
The controller learns within the stream, apart from the warm-up of every ``LLM``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice, product
from pathlib import Path
from typing import Annotated

import torch
import typer

from foretoken import zoo
from foretoken.bench.setting import cores, setting, wide_console
from foretoken.bench.workloads import FUNCTIONS, load_prompts
from foretoken.control.fixed import Fixed
from foretoken.engine.loop import Engine
from foretoken.engine.warmup import warm_up
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.speculation import Builder, SpeculativeConfig
from foretoken.train.widen.checkpoint import scaled
from mixture import Cell, Dictation, Task, compare, table, tasks

ADAPTIVE, PLAIN = "adaptive", "depth 0"
DRAFT = '{"method": "draft_model"}'


def stream(each: Sequence[Task], hot: float, crowd: int) -> list[Task]:
    """Returns every completion three times: as it is, at the high temperature, and in a batch of ``crowd`` requests."""
    requests: list[Task] = []
    others = cycle(task.prompt for task in each if task.part == "completion")
    for task in each:
        requests.append(task)
        if task.part == "completion":
            requests.append(replace(task, part="hot", temperature=hot))
            if crowd > 1:
                requests.append(replace(task, part="crowd", beside=tuple(islice(others, crowd - 1))))
    return requests


def foreknown(cells: Sequence[Cell]) -> float:
    """Returns the speedup of each part's best draft length over the best single draft length, on the whole stream."""
    taken: dict[str, dict[str, float]] = defaultdict(dict)
    for cell in cells:
        if cell.system != ADAPTIVE:
            taken[cell.part][cell.system] = cell.seconds
    return min(taken["stream"].values()) / sum(min(own.values()) for part, own in taken.items() if part != "stream")


def main(
    target: Annotated[Path | None, typer.Option(help="Default: the bundled one, widened to 0.7 B.")] = None,
    small: Annotated[bool, typer.Option("--small", help="The bundled target itself.")] = False,
    speculative_config: Annotated[list[str], typer.Option(help="A proposer as JSON; may be repeated.")] = [DRAFT],
    depth: Annotated[list[int], typer.Option(help="A fixed depth; may be repeated.")] = [1, 2, 3, 4, 6, 8, 12, 16],
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with a prompt each, for completion.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Requests of each part.")] = 6,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 128,
    hot: Annotated[float, typer.Option(min=0.0, help="The high temperature.")] = 1.5,
    crowd: Annotated[int, typer.Option(min=0, help="Requests at once in the last part; 0 is none.")] = 16,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    json_file: Annotated[Path | None, typer.Option("--output", help="Write setting and cells here.")] = None,
) -> None:
    """Prints tokens per second of the adaptive controller and of each fixed draft length, by part and in total."""
    torch.set_num_threads(cores())
    path = target or (zoo.path("target") if small else scaled())
    tokenizer = load_tokenizer(path)
    model = Dictation(load_model(path, max_length=4096))
    builder = Builder(model, tokenizer, path, lambda other: load_model(Path(other), max_length=4096))
    members = [json.loads(text) for text in speculative_config]
    for member in members:
        if member["method"] == "draft_model":
            member.setdefault("model", str(zoo.path("draft")))
    engines = {PLAIN: Engine(model, builder.build(SpeculativeConfig.of(members[0])), Fixed(0))}
    for member, k in product(members, depth):
        name = f"{member['method']} {k}" if len(members) > 1 else f"depth {k}"
        engines[name] = Engine(model, builder.build(SpeculativeConfig.of(member)), Fixed(k))
    config = SpeculativeConfig.of(members[0] if len(members) == 1 else {"method": "mixture", "members": members})
    proposer = builder.build(config)
    warm_up(model, proposer, builder.costs, config.max_tokens)
    engines[ADAPTIVE] = Engine(model, proposer, config.controller(model.device, builder.costs, proposer))
    texts = load_prompts(prompts) if prompts else list(FUNCTIONS)
    requests = stream(list(tasks(tokenizer, texts, count, tokens)), hot, crowd)
    parts = tuple(dict.fromkeys(task.part for task in requests))
    cells = compare(engines, requests, repeats)
    console = wide_console()
    console.print(table(cells, list(engines), ADAPTIVE, PLAIN, parts, single=True))
    bound = foreknown(cells)
    console.print(f"each part at its own best depth, known beforehand: {bound:.3f} of the best single one")
    facts = setting() | {
        "target": path.name,
        "members": members,
        "count": count,
        "tokens": tokens,
        "crowd": crowd,
        "repeats": repeats,
    }
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    if json_file is not None:
        rows = [asdict(cell) | {"tokens_per_second": cell.speed} for cell in cells]
        json_file.write_text(json.dumps({"setting": facts, "cells": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
