"""The default beside plain decoding and configurations chosen by hand, in turns of a few steps.

    python benchmarks/defaults.py --prompts humaneval.jsonl --temperature 0 --temperature 1
    python benchmarks/defaults.py --batch 8 --count 8
    python benchmarks/defaults.py --target WIDE --draft none --batch 16 --count 16  # its MTP layers alone
    python benchmarks/defaults.py --target SmolLM2.gguf --draft none --prompts spec_bench.jsonl --by-category \
        --config '{"method": "suffix"}' --config '{"method": "eagle3", "model": "smollm2-135m-eagle3"}'
    python benchmarks/defaults.py --part completion --part editing --part repetition --prefill --temperature 0 \
        --depth 2 --depth 8 --config '{"method": "draft_model"}' --config '{"method": "suffix"}'

All systems complete the same prompts, each in an ``LLM`` of its own in this process, and take turns of ``--steps``
steps, so that a slow minute slows all of them. Figures are tokens over seconds while decoding, or with ``--prefill`` of
all steps. Systems keep what they learn from request to request; texts of other requests the default never copies.

The parts of a mixed stream alternate. completion: functions, or the prompts of a file. editing: a function, then the
same function with a rename and a fix, with the original as the client's prediction. repetition: one pattern repeated
with other words in it. The output of the last two is forced (``foretoken.bench.editing``), at temperature 0.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.editing import ForcedOutput, editing_tasks
from foretoken.bench.grid import WORDS
from foretoken.bench.output import cores, figures, progress, report
from foretoken.bench.workloads import FUNCTIONS, encoded_prompts
from foretoken.models.formats.checkpoint import load_tokenizer
from options import Output, Prompts, Repeats, Small, Target, Temperatures, target_path
from systems import System, Totals, Workload, engine_on, take_turns

DEFAULT, PLAIN, STREAM = "default", "plain", "all"
PARTS = COMPLETION, EDITING, REPETITION = ("completion", "editing", "repetition")
BY_HAND = (
    '{"method": "draft_model", "num_speculative_tokens": 4}',
    '{"method": "draft_model", "num_speculative_tokens": 6}',
    '{"method": "draft_model", "tree": "sampled", "num_speculative_tokens": 6}',
    '{"method": "draft_model", "control": "goodput"}',
)
_WORDS = tuple(chain(*WORDS))
_PATTERNS = (
    "    assert parse('{0}: {1}') == ('{0}', '{1}')\n",
    "    {{'name': '{0}', 'colour': '{1}', 'size': {2}}},\n",
    "register('{0}', handler=on_{0}, fallback=on_{1}, timeout={2})\n",
    "INSERT INTO items (name, origin, amount) VALUES ('{0}', '{1}', {2});\n",
)


def by_categories(texts: Sequence[Any], file: Path, count: int) -> dict[str, list[Any]]:
    """Returns the first ``count`` of ``texts`` of each category, in the order of the lines of ``file``."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    parts: dict[str, list[Any]] = {}
    for text, line in zip(texts, lines, strict=True):
        parts.setdefault(str(json.loads(line).get("category", "other")), []).append(text)
    return {category: part[:count] for category, part in parts.items()}


def forced(part: str, tokenizer: Any, count: int) -> Iterator[Workload]:
    """Yields requests of editing or repetition."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def work(prompt: list[int], output: list[int], prediction: list[int] | None = None) -> Workload:
        params = SamplingParams(max_tokens=len(output), temperature=0.0, ignore_eos=True, prediction=prediction)
        return Workload(part, [{"prompt_token_ids": prompt}], params, output)

    if part == EDITING:
        yield from (work(task.prompt, task.output, task.reference) for task in editing_tasks(tokenizer)[:count])
        return
    for number in range(count):
        lines = [_pattern_line(number, line) for line in range(18)]
        yield work(ids("".join(lines[:2])), ids("".join(lines[2:])))


def _pattern_line(task: int, line: int) -> str:
    word = task * 7 + line * 5
    return _PATTERNS[task % len(_PATTERNS)].format(_WORDS[word % 16], _WORDS[(word * 3 + line) % 16], word * 37 % 91)


def race(
    systems: Mapping[str, System], stream: Sequence[Workload], steps: int, prefill: bool
) -> dict[str, dict[str, Totals]]:
    """Returns each system's totals by cell, and of the whole stream if it has several."""
    order, cells = random.Random(0), {work.cell: dict.fromkeys(systems, Totals()) for work in stream}
    for work in progress(stream, "requests"):
        for name, totals in take_turns(systems, work, steps, order, prefill).items():
            cells[work.cell][name] += totals
    if len(cells) > 1:
        cells[STREAM] = {name: sum((cell[name] for cell in cells.values()), Totals()) for name in systems}
    return cells


def rows(cells: Mapping[str, Mapping[str, Totals]]) -> Iterator[tuple[str, ...]]:
    """Yields a line for each cell and system, with the ratio to plain decoding and to the fastest by hand."""
    for cell, totals in cells.items():
        best = max((total.speed for name, total in totals.items() if name not in (DEFAULT, PLAIN)), default=0.0)
        for name, total in totals.items():
            ratios = f"{total.speed / totals[PLAIN].speed:.2f}", f"{total.speed / best:.2f}" if best else ""
            yield cell, name, f"{total.speed:.1f}", f"{total.tokens_per_pass:.2f}", *ratios


def configurations(given: Sequence[str], depths: Sequence[int], draft: str) -> dict[str, dict[str, Any]]:
    """Returns all configurations by name. draft: the draft model of those that name none, or "none"."""
    shared = {} if draft == "none" else {"model": draft}
    named: dict[str, dict[str, Any]] = {PLAIN: {"method": "none"}, DEFAULT: shared}
    for keys in map(json.loads, given or (BY_HAND if shared else ())):
        heads = keys.get("method", "draft_model") not in ("draft_model", "auto")
        for fixed in [{"num_speculative_tokens": depth, "control": "fixed"} for depth in depths] or [{}]:
            own = keys | fixed
            named[" ".join(map(str, own.values()))] = own if heads else {**shared, **own}
    return named


def main(
    target: Target = None,
    small: Small = False,
    draft: Annotated[
        str | None, typer.Option(help="Default: the bundled one; none: what ships with the target drafts.")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(help="A configuration by hand as JSON; repeatable.")] = None,
    depth: Annotated[list[int], typer.Option(min=1, help="Fixed draft lengths by hand; repeatable.")] = [],
    part: Annotated[list[str], typer.Option(help=f"{', '.join(PARTS)}; repeatable.")] = [COMPLETION],
    prompts: Prompts = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of each part or category.")] = 8,
    by_category: Annotated[bool, typer.Option("--by-category", help="A cell for each category of --prompts.")] = False,
    tokens: Annotated[int, typer.Option(min=2, help="Of each completion.")] = 96,
    temperature: Temperatures = [0.0, 1.0],
    batch: Annotated[int, typer.Option(min=1, help="Prompts completed at once.")] = 1,
    quantization: Annotated[str | None, typer.Option(help="Of the target.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of a turn.")] = 8,
    prefill: Annotated[bool, typer.Option("--prefill", help="Count steps that compute prompts.")] = False,
    repeats: Repeats = 1,
    output: Output = None,
) -> None:
    """Prints tokens per second of the default, of plain decoding and of configurations by hand."""
    torch.set_num_threads(cores())
    where = target_path(target, small)
    tokenizer = load_tokenizer(where)
    texts: dict[str, list[Any]] = {"": [FUNCTIONS[i % len(FUNCTIONS)] for i in range(count)]}
    if prompts:
        encoded = encoded_prompts(tokenizer, prompts, None if by_category else count)
        texts = by_categories(encoded, prompts, count) if by_category else {"": encoded}
    lanes: list[list[Workload]] = [list(forced(name, tokenizer, count)) for name in part if name != COMPLETION]
    for heat in temperature if COMPLETION in part else ():
        params = SamplingParams(max_tokens=tokens, temperature=heat, ignore_eos=True)
        for category, own in texts.items():
            groups = [own[at : at + batch] for at in range(0, len(own), batch)]
            lanes.append([Workload(f"{heat:g} {category}".strip(), group, params) for group in groups])
    stream = [work for works in zip_longest(*lanes) for work in works if work is not None] * repeats
    options: dict[str, Any] = {"max_num_seqs": max(16, batch), "quantization": quantization}
    with ExitStack() as stack:
        systems: dict[str, System] = {}
        for name, keys in configurations(config or (), depth, draft or str(zoo.path("draft"))).items():
            llm = stack.enter_context(closing(LLM(where, speculative_config=keys, **options)))
            engine = engine_on(ForcedOutput(llm.target), llm) if set(part) - {COMPLETION} else None
            systems[name] = System(llm, engine)
        print("the default drafts by", systems[DEFAULT].llm.methods[0])
        cells = race(systems, stream, steps, prefill)
    facts = {"target": where.name, "count": count, "tokens": tokens, "batch": batch, "steps": steps, "prefill": prefill}
    heads = ("T", "system", "tokens/s", "tokens a step", "/ plain", "/ best by hand")
    record = {title: {name: asdict(total) for name, total in cell.items()} for title, cell in cells.items()}
    report([figures(heads, rows(cells))], facts, output, cells=record)


if __name__ == "__main__":
    typer.run(main)
