"""A mixed stream of greedy requests, one at a time: the mixture beside each of its members alone.

    python benchmarks/mixture.py --output mixture.json

The stream is that of ``systems.py``. Figures are total tokens over total seconds of a part. Systems keep what they
learn from request to request, and start empty.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from foretoken.bench.output import report
from foretoken.bench.setting import cores
from foretoken.bench.workloads import prompts_or_functions
from options import Draft, Output, Prompts, Repeats, Target, target_path
from systems import compare, compared, fixed_engine, forced_builder, proposer_configs, tasks


def main(
    target: Target = None,
    draft: Draft = None,
    member: Annotated[list[str], typer.Option(help="A member as JSON; may be repeated.")] = [
        '{"method": "suffix"}',
        '{"method": "prediction"}',
        '{"method": "recycling"}',
        '{"method": "ngram"}',
        '{"method": "draft_model", "num_speculative_tokens": 6}',
    ],
    prompts: Prompts = None,
    count: Annotated[int, typer.Option(min=1, help="Requests of each part.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 128,
    repeats: Repeats = 2,
    output: Output = None,
) -> None:
    """Prints tokens per second of the mixture and of each member alone, by part and in total."""
    torch.set_num_threads(cores())
    path = target_path(target)
    builder, members = forced_builder(path), proposer_configs(member, draft)
    configs = {"none": {"method": "none"}, **{config["method"]: config for config in members}}
    configs["mixture"] = {"method": "mixture", "members": members}
    engines = {name: fixed_engine(builder, config) for name, config in configs.items()}
    stream = list(tasks(builder.tokenizer, prompts_or_functions(prompts), count, tokens))
    cells = compare(engines, stream, repeats)
    facts = {"target": path.name, "count": count, "tokens": tokens, "repeats": repeats}
    table = compared(cells, list(engines), "none", "mixture")
    report([table], facts, output, cells=[cell.record() for cell in cells])


if __name__ == "__main__":
    typer.run(main)
