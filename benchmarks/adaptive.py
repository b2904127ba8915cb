"""A mixed stream of requests: the draft policy beside every proposer at every fixed draft length.

    python benchmarks/adaptive.py --output adaptive.json
    python benchmarks/adaptive.py --crowd 0

With several proposers, given by repeated ``--speculative-config``, of which at most one is a model, the adaptive system
is their mixture.

The stream is that of ``systems.py``, with every completion also at a high temperature, and in batches of ``--crowd``
completions at once. Figures are total tokens over total seconds. The policy learns within the stream, apart from
the warm-up of every ``LLM``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice, product
from typing import Annotated

import torch
import typer

from foretoken.bench.output import report
from foretoken.bench.setting import cores
from foretoken.bench.workloads import prompts_or_functions
from foretoken.control.config import build
from foretoken.engine.loop import Engine
from foretoken.engine.warmup import warm_up
from foretoken.propose.union import Union
from foretoken.speculation import SpeculativeConfig
from options import Output, Prompts, Repeats, Small, Target, target_path
from systems import Cell, Task, compare, compared, fixed_engine, forced_builder, proposer_configs, tasks

ADAPTIVE, PLAIN = "adaptive", "depth 0"


def with_variants(tasks: Sequence[Task], hot: float, crowd: int) -> list[Task]:
    """Returns every completion three times: as it is, at the high temperature, and in a batch of ``crowd`` requests."""
    requests: list[Task] = []
    others = cycle(task.prompt for task in tasks if task.part == "completion")
    for task in tasks:
        requests.append(task)
        if task.part == "completion":
            requests.append(replace(task, part="hot", temperature=hot))
            if crowd > 1:
                requests.append(replace(task, part="crowd", beside=tuple(islice(others, crowd - 1))))
    return requests


def best_by_part(cells: Sequence[Cell]) -> float:
    """Returns the speedup of each part's best draft length over the best single draft length, on the whole stream."""
    seconds: dict[str, dict[str, float]] = defaultdict(dict)
    for cell in cells:
        if cell.system != ADAPTIVE:
            seconds[cell.part][cell.system] = cell.totals.seconds
    stream = seconds.pop("stream")
    return min(stream.values()) / sum(min(by_system.values()) for by_system in seconds.values())


def main(
    target: Target = None,
    small: Small = False,
    speculative_config: Annotated[list[str], typer.Option(help="A proposer as JSON; may be repeated.")] = [
        '{"method": "draft_model"}'
    ],
    depth: Annotated[list[int], typer.Option(help="A fixed depth; may be repeated.")] = [1, 2, 3, 4, 6, 8, 12, 16],
    prompts: Prompts = None,
    count: Annotated[int, typer.Option(min=1, help="Requests of each part.")] = 6,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 128,
    hot: Annotated[float, typer.Option(min=0.0, help="The high temperature.")] = 1.5,
    crowd: Annotated[int, typer.Option(min=0, help="Requests at once in the last part; 0 is none.")] = 16,
    repeats: Repeats = 2,
    output: Output = None,
) -> None:
    """Prints tokens per second of the draft policy and of each fixed draft length, by part and in total."""
    torch.set_num_threads(cores())
    path = target_path(target, small)
    builder, members = forced_builder(path), proposer_configs(speculative_config)
    engines = {PLAIN: fixed_engine(builder, members[0], 0)}
    for member, k in product(members, depth):
        name = f"{member['method']} {k}" if len(members) > 1 else f"depth {k}"
        engines[name] = fixed_engine(builder, member, k)
    config = SpeculativeConfig.of(members[0] if len(members) == 1 else {"method": "mixture", "members": members})
    proposer = builder.build(config)
    warm_up(builder.target, proposer, builder.costs, config.max_tokens)
    controller = build(config.control_in_force, config.max_tokens, builder.target.device, builder.policy)
    engines[ADAPTIVE] = Engine(builder.target, Union.of(proposer, builder.policy), controller)
    stream = list(tasks(builder.tokenizer, prompts_or_functions(prompts), count, tokens))
    cells = compare(engines, with_variants(stream, hot, crowd), repeats)
    bound = f"each part at its own best depth, known beforehand: {best_by_part(cells):.3f} of the best single one"
    facts = {"target": path.name, "members": members, "count": count, "tokens": tokens}
    facts |= {"crowd": crowd, "repeats": repeats}
    table = compared(cells, list(engines), PLAIN, ADAPTIVE, single=True)
    report([table, bound], facts, output, cells=[cell.record() for cell in cells])


if __name__ == "__main__":
    typer.run(main)
