"""The default beside configurations chosen by hand, in turns of a few steps, so that a slow minute slows all of them.

    python benchmarks/defaults.py --prompts humaneval.jsonl --temperature 0 --temperature 1
    python benchmarks/defaults.py --batch 8 --count 8
    python benchmarks/defaults.py --target WIDE --draft none --batch 16 --count 16  # its MTP layers alone
    python benchmarks/defaults.py --target SmolLM2.gguf --draft none --prompts spec_bench.jsonl --by-category \
        --config '{"method": "suffix"}' --config '{"method": "eagle3", "model": "smollm2-135m-eagle3"}'

All systems complete the same prompts, each in an ``LLM`` of its own in this process, and take turns of ``--steps``
steps. Figures are tokens over seconds while decoding: what came with the first tokens, and the time until then, does
not count. The default may draft from what it learned on earlier prompts of the same run, as users' requests do; texts
of other requests it never copies.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from rich.table import Table

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.output import figures, report
from foretoken.bench.setting import cores
from foretoken.bench.workloads import FUNCTIONS, encoded_prompts
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.outputs import StreamPiece
from options import Output, Prompts, Target, Temperatures, target_path
from systems import Totals

DEFAULT, PLAIN = "default", "plain"
BY_HAND = (
    '{"method": "draft_model", "num_speculative_tokens": 4}',
    '{"method": "draft_model", "num_speculative_tokens": 6}',
    '{"method": "draft_model", "tree": "sampled", "num_speculative_tokens": 6}',
    '{"method": "draft_model", "control": "goodput"}',
)


@dataclass
class Run:
    """A system's completions of one group of prompts, as far as they are.

    Attributes:
        pieces: What it writes from here on.
        open: Number of completions that are not finished.
    """

    pieces: Iterator[StreamPiece]
    open: int

    def advance(self, steps: int) -> Totals:
        """Runs about ``steps`` steps, one piece for each open completion."""
        started = perf_counter()
        pieces = list(islice(self.pieces, steps * self.open))
        self.open -= sum(piece.output is not None for piece in pieces)
        return Totals(sum(len(piece.token_ids) for piece in pieces), len(pieces), perf_counter() - started)


def begun(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> Run:
    """Starts completions and returns them once every one has its first tokens."""
    pieces, first, finished = llm.stream(list(prompts), params), set[int](), 0
    for piece in pieces:
        first.add(piece.request_id)
        finished += piece.output is not None
        if len(first) == len(prompts):
            break
    return Run(pieces, len(prompts) - finished)


def race(
    systems: Mapping[str, LLM], groups: Sequence[Sequence[Any]], params: SamplingParams, steps: int
) -> dict[str, Totals]:
    """Returns each system's total over all groups of prompts, in turns of ``steps`` steps in random order."""
    totals, order = {name: Totals() for name in systems}, random.Random(0)
    for group in track(groups, f"temperature {params.temperature:g}"):
        runs = {name: begun(llm, group, params) for name, llm in systems.items()}
        while left := [name for name, run in runs.items() if run.open]:
            for name in order.sample(left, len(left)):
                totals[name] += runs[name].advance(steps)
    return totals


def by_categories(texts: Sequence[Any], file: Path, count: int) -> dict[str, list[Any]]:
    """Returns the first ``count`` of ``texts`` of each category, in the order of the lines of ``file``."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    parts: dict[str, list[Any]] = {}
    for text, line in zip(texts, lines, strict=True):
        parts.setdefault(str(json.loads(line).get("category", "other")), []).append(text)
    return {category: part[:count] for category, part in parts.items()}


def table(cells: Mapping[str, Mapping[str, Totals]]) -> Table:
    """Returns a line for each cell and system, the ratio to plain decoding and to the fastest by hand."""
    rows = []
    for cell, totals in cells.items():
        best = max((total.speed for name, total in totals.items() if name not in (DEFAULT, PLAIN)), default=0.0)
        for name, total in totals.items():
            ratios = f"{total.speed / totals[PLAIN].speed:.2f}", f"{total.speed / best:.2f}" if best else ""
            rows.append((cell, name, f"{total.speed:.1f}", f"{total.tokens_per_pass:.2f}", *ratios))
    return figures(("T", "system", "tokens/s", "tokens a step", "/ plain", "/ best by hand"), rows)


def main(
    target: Target = None,
    draft: Annotated[
        str | None, typer.Option(help="Default: the bundled one; none: what ships with the target drafts.")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(help="A configuration by hand as JSON; repeatable.")] = None,
    prompts: Prompts = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts, with --by-category of each.")] = 8,
    by_category: Annotated[bool, typer.Option("--by-category", help="A cell for each category of --prompts.")] = False,
    tokens: Annotated[int, typer.Option(min=2, help="Of each completion.")] = 96,
    temperature: Temperatures = [0.0, 1.0],
    batch: Annotated[int, typer.Option(min=1, help="Prompts completed at once.")] = 1,
    quantization: Annotated[str | None, typer.Option(help="Of the target.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of a turn.")] = 8,
    output: Output = None,
) -> None:
    """Prints tokens per second of the default, of plain decoding and of configurations by hand."""
    torch.set_num_threads(cores())
    where, model = target_path(target), draft or str(zoo.path("draft"))
    shared: dict[str, Any] = {} if model == "none" else {"model": model}
    parts: dict[str, list[Any]] = {"": [FUNCTIONS[i % len(FUNCTIONS)] for i in range(count)]}
    if prompts:
        texts = encoded_prompts(load_tokenizer(where), prompts, None if by_category else count)
        parts = by_categories(texts, prompts, count) if by_category else {"": texts}
    named: dict[str, dict[str, Any]] = {PLAIN: {"method": "none"}, DEFAULT: shared}
    for each in config or (BY_HAND if shared else ()):
        keys = json.loads(each)
        heads = keys.get("method", "draft_model") not in ("draft_model", "auto")
        named[" ".join(str(value) for value in keys.values())] = keys if heads else {**shared, **keys}
    with ExitStack() as stack:
        options: dict[str, Any] = {"max_num_seqs": max(16, batch), "quantization": quantization}
        systems = {
            name: stack.enter_context(closing(LLM(where, speculative_config=keys, **options)))
            for name, keys in track(named.items(), "loading")
        }
        print("the default drafts by", systems[DEFAULT].methods[0])
        cells = {}
        for heat in temperature:
            params = SamplingParams(max_tokens=tokens, temperature=heat, ignore_eos=True)
            for part, texts in parts.items():
                groups = [texts[at : at + batch] for at in range(0, len(texts), batch)]
                cells[f"{heat:g} {part}".strip()] = race(systems, groups, params, steps)
    facts = {"target": where.name, "count": count, "tokens": tokens, "batch": batch, "steps": steps}
    record = {title: {name: asdict(total) for name, total in cell.items()} for title, cell in cells.items()}
    report([table(cells)], facts, output, cells=record)


if __name__ == "__main__":
    typer.run(main)
