"""The default beside configurations chosen by hand, in turns of a few steps, so that a slow minute slows all of them.

    python benchmarks/defaults.py --prompts humaneval.jsonl --temperature 0 --temperature 1
    python benchmarks/defaults.py --batch 8 --count 8
    python benchmarks/defaults.py --target SmolLM2.gguf --draft none --batch 8 --count 16 --parts
    python benchmarks/defaults.py --target WIDE --draft none --batch 16 --count 16  # its MTP layers alone
    python benchmarks/defaults.py --target SmolLM2.gguf --draft none --prompts spec_bench.jsonl --by-category \
        --config '{"method": "suffix"}' --config '{"method": "eagle3", "model": "smollm2-135m-eagle3"}'

All systems complete the same prompts, each in an ``LLM`` of its own in this process, and take turns of ``--steps``
steps. Figures are tokens over seconds while decoding: what came with the first tokens, and the time until then, does
not count. The default may draft from what it learned on earlier prompts of the same run, as users' requests do; texts
of other requests it never copies.

--parts adds the milliseconds of a step by part. Those of the draft policy and of the calls of the draft model or head
are also in "propose" and "other".
"""

import json
import random
from collections import defaultdict
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
from foretoken.bench.measure import Stopwatch
from foretoken.bench.output import cores, figures, report
from foretoken.bench.workloads import FUNCTIONS, encoded_prompts
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.outputs import StreamPiece
from foretoken.propose.union import Union
from options import Output, Prompts, Target, Temperatures, target_path
from systems import Totals

DEFAULT, PLAIN = "default", "plain"
LAPS = {"propose": "propose", "score": "target", "verify": "verify", "commit": "commit"}  # of ``Timings``
POLICY = ["budgets", "lengths", "value", "searches", "keep", "decision", "searched", "copy_record", "claim_record"]
POLICY += ["settle", "drafted", "observe"]
BY_HAND = (
    '{"method": "draft_model", "num_speculative_tokens": 4}',
    '{"method": "draft_model", "num_speculative_tokens": 6}',
    '{"method": "draft_model", "tree": "sampled", "num_speculative_tokens": 6}',
    '{"method": "draft_model", "control": "goodput"}',
)


@dataclass
class Run:
    """A system's completions of one group of prompts, as far as they are."""

    pieces: Iterator[StreamPiece]  # what it writes from here on
    open: int  # number of completions that are not finished
    parts: defaultdict[str, float]  # seconds of its steps by part, and their number

    def advance(self, steps: int) -> Totals:
        """Runs about ``steps`` steps, one piece for each open completion."""
        started = perf_counter()
        pieces = list(islice(self.pieces, steps * self.open))
        seconds = perf_counter() - started
        self.open -= sum(piece.output is not None for piece in pieces)
        self.parts["total"] += seconds
        for timings in (piece.step.timings for piece in pieces):  # those of a step are in ``batch`` pieces
            self.parts["steps"] += 1 / timings.batch
            for lap, part in LAPS.items():
                self.parts[part] += getattr(timings, lap) / timings.batch
        return Totals(sum(len(piece.token_ids) for piece in pieces), len(pieces), seconds)


def watches(llm: LLM) -> dict[str, Stopwatch]:
    """Returns clocks of the draft policy and of the calls of the draft model or head of the default method."""
    proposer = llm.proposer_of(llm.methods[0])
    if not isinstance(proposer, Union):
        return {}
    policy, model = proposer.policy, proposer.model and proposer.model.proposer
    net = getattr(model, "net", None) or getattr(model, "model", None)
    drafting = [(net, name) for name in ("chains", "score") if hasattr(net, name)]
    return {
        "policy": Stopwatch([*((policy, name) for name in POLICY), (policy.costs, "observe")]),
        "draft model": Stopwatch(drafting),
    }


def begun(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> tuple[Iterator[StreamPiece], int]:
    """Starts completions, and waits until each has its first tokens.

    Returns:
        The pieces that follow, and the number of unfinished completions.
    """
    pieces, first, finished = llm.stream(list(prompts), params), set[int](), 0
    for piece in pieces:
        first.add(piece.request_id)
        finished += piece.output is not None
        if len(first) == len(prompts):
            break
    return pieces, len(prompts) - finished


def race(
    systems: Mapping[str, LLM],
    groups: Sequence[Sequence[Any]],
    params: SamplingParams,
    steps: int,
    clocks: Mapping[str, Mapping[str, Stopwatch]],
) -> tuple[dict[str, Totals], Mapping[str, Mapping[str, float]]]:
    """Returns each system's total over all groups of prompts, in turns of ``steps`` steps in random order.

    The second value has the seconds of all steps by part, and the number of steps. ``clocks`` are open ``watches``.
    """
    totals, order = {name: Totals() for name in systems}, random.Random(0)
    parts = {name: defaultdict[str, float](float) for name in systems}
    for group in track(groups, f"temperature {params.temperature:g}"):
        runs = {name: Run(*begun(llm, group, params), parts[name]) for name, llm in systems.items()}
        while left := [name for name, run in runs.items() if run.open]:
            for name in order.sample(left, len(left)):
                before = {part: clock.seconds for part, clock in clocks[name].items()}
                totals[name] += runs[name].advance(steps)
                for part, clock in clocks[name].items():
                    parts[name][part] += clock.seconds - before[part]
    return totals, parts


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


def parts_table(cells: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    """Returns a line for each cell and system with the milliseconds of a step by part."""
    names = [*LAPS.values(), "other", "total", "policy", "draft model"]
    rows = []
    for cell, systems in cells.items():
        for name, parts in systems.items():
            own = {**parts, "other": parts["total"] - sum(parts[part] for part in LAPS.values())}
            rows.append((cell, name, *(f"{1e3 * own.get(part, 0.0) / parts['steps']:.3f}" for part in names)))
    return figures(("T", "ms of a step", *names), rows)


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
    by_part: Annotated[bool, typer.Option("--parts", help="Add the milliseconds of a step by part.")] = False,
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
        clocks = {name: watches(llm) if by_part else {} for name, llm in systems.items()}
        for clock in (clock for own in clocks.values() for clock in own.values()):
            stack.enter_context(clock)
        cells, parts_of = {}, {}
        for heat in temperature:
            params = SamplingParams(max_tokens=tokens, temperature=heat, ignore_eos=True)
            for part, texts in parts.items():
                groups = [texts[at : at + batch] for at in range(0, len(texts), batch)]
                cell = f"{heat:g} {part}".strip()
                cells[cell], parts_of[cell] = race(systems, groups, params, steps, clocks)
    facts = {"target": where.name, "count": count, "tokens": tokens, "batch": batch, "steps": steps}
    record = {title: {name: asdict(total) for name, total in cell.items()} for title, cell in cells.items()}
    tables = [table(cells), *([parts_table(parts_of)] if by_part else [])]
    report(tables, facts, output, cells=record, seconds=parts_of)


if __name__ == "__main__":
    typer.run(main)
