"""Mean acceptance length of every method, at equal rows of the target: chains and trees of 4, 8 and 16 nodes.

    python benchmarks/acceptance.py --prompts humaneval.jsonl --output acceptance.json

Two kinds of text that are in neither model's training data: the prompts of --prompts, and excerpts of the standard
library's held-out files. The figure is tokens per pass of the target, prefill included; end-of-text is ignored.
With --context 500 --context 8000 the excerpts have these lengths, and a second table shows acceptance by output
position.
At temperature 0 every text must equal plain decoding's. Methods that learn start empty in every cell.
Heads that are missing, and methods that need files (--datastore, --other-draft), are skipped with a message.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track
from rich.table import Table

from foretoken import zoo
from foretoken.bench.output import cores, figures, report, wide_console
from foretoken.bench.workloads import prompts_or_functions
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.errors import ForetokenError
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.sequence import Counts
from foretoken.engine.stopping import Length
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.outputs import SPAN
from foretoken.speculation import Builder, SpeculativeConfig
from foretoken.train.data import standard_library
from options import Draft, Output, Prompts, Temperatures, target_path

TokenIds = list[list[int]]
Cell = dict[str, Any]  # result of one method with drafts of at most ``nodes`` nodes
COUNTED = ("tokens", "drafts", "drafted", "accepted", "accepted_per_position", "by_output")
SYSTEMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("draft model, chain", {"method": "draft_model"}),
    ("draft model, top-k tree", {"method": "draft_model", "tree": "top_k"}),
    ("draft model, drawn tree", {"method": "draft_model", "tree": "sampled"}),
    ("draft model, top and one drawn", {"method": "draft_model", "tree": "greedy_multi"}),
    ("EAGLE-3, chain", {"method": "eagle3", "top_k": 1}),
    ("EAGLE-3, tree", {"method": "eagle3"}),
    ("DSpark, chain", {"method": "dspark", "tree": "chain"}),
    ("DSpark, tree", {"method": "dspark"}),
    ("MTP, chain", {"method": "mtp", "top_k": 1}),
    ("MTP, tree", {"method": "mtp"}),
    ("Medusa, chain", {"method": "medusa", "top_k": 1}),
    ("Medusa, tree", {"method": "medusa"}),
    ("blockwise, chain", {"method": "blockwise", "top_k": 1}),
    ("blockwise, tree", {"method": "blockwise", "top_k": 8}),
    ("early exit, chain", {"method": "early_exit"}),
    ("early exit, tree", {"method": "early_exit", "tree": "top_k"}),
    ("other tokenizer, chain", {"method": "vocabulary"}),
    ("other tokenizer, tree", {"method": "vocabulary", "algorithm": "tli", "tree": "top_k"}),
    ("prompt lookup, chain", {"method": "ngram"}),
    ("suffix, chain", {"method": "suffix", "top_k": 1}),
    ("suffix, tree", {"method": "suffix"}),
    ("recycling, chain", {"method": "recycling", "top_k": 1}),
    ("recycling, tree", {"method": "recycling"}),
    ("retrieval, chain", {"method": "retrieval", "top_k": 1}),
    ("retrieval, tree", {"method": "retrieval"}),
    ("suffix and recycling, mixed", {"method": "mixture"}),
)


def measure(
    builder: Builder, config: dict[str, Any], nodes: int, prompts: TokenIds, temperature: float, sizes: tuple[int, int]
) -> tuple[Cell, TokenIds]:
    """Runs one method on all prompts. Returns its counts and the generated token ids.

    Passes without a draft count, too. accepted_per_position: accepted tokens by depth. sizes: tokens of each
    completion, and sequences at once.
    """
    proposer = builder.build(SpeculativeConfig.of(config))
    engine = Engine(builder.target, proposer, Fixed(nodes), max_sequences=sizes[1])
    counts, law = Counts(), SamplingLaw(temperature=temperature)
    contexts = [Context(i, list(ids), len(ids), law, Streams(i)) for i, ids in enumerate(prompts)]
    for step in engine.run((context, Length(sizes[0])) for context in contexts):
        counts.add(step)
    stats = counts.freeze()
    cell = {key: getattr(stats, key) for key in COUNTED} | {"passes": stats.steps}
    cell["mean_acceptance_length"] = stats.tokens / stats.steps
    return cell, [context.tokens[context.prompt_length :] for context in contexts]


def cuts(texts: Sequence[str], tokenizer: Any, count: int, length: int, following: int) -> TokenIds:
    """Returns ``count`` excerpts of ``length`` tokens from random places of the files, the same ones every time.

    following: Tokens that must follow an excerpt in its file.
    """
    # The tokenizer beneath: a whole file is longer than the model's positions, which is no reason for a warning.
    streams = [tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    streams = [ids for ids in streams if len(ids) > length + following]
    rng = np.random.default_rng(0)
    excerpts = []
    for i in range(count):
        ids = streams[i % len(streams)]
        at = int(rng.integers(0, len(ids) - length - following))
        excerpts.append(list(ids[at : at + length]))
    return excerpts


def systems(
    given: Sequence[str], draft: str, other_draft: str | None, datastore: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the methods by name, with the models or files that they need."""
    models = {"draft_model": draft, "vocabulary": other_draft, "retrieval": datastore}
    for name, config in [(text, json.loads(text)) for text in given] or SYSTEMS:
        model = models.get(config["method"])
        if config["method"] not in models or "model" in config:
            yield name, config
        elif model is not None:
            yield name, config | {"model": model}


def table(cells: Sequence[Cell], grid: Sequence[tuple[str, float, int]]) -> Table:
    """Returns a table with a line for each method, and columns by text, temperature and nodes."""
    keys = ("system", "text", "temperature", "nodes")
    by_column = {tuple(cell[key] for key in keys): f"{cell['mean_acceptance_length']:.2f}" for cell in cells}
    names = dict.fromkeys(cell["system"] for cell in cells)
    rows = [(name, *(by_column.get((name, *column), "") for column in grid)) for name in names]
    return figures(("tokens per pass", *(f"{text} T={heat:g} n={n}" for text, heat, n in grid)), rows)


def by_output(cells: Sequence[Cell]) -> Table:
    """Returns a table with a line for each cell, and mean acceptance lengths by output position."""
    widest = max((len(cell["by_output"]) for cell in cells), default=0)
    rows = []
    for cell in cells:
        lengths = [f"{1 + accepted / drafts:.2f}" if drafts else "" for drafts, accepted in cell["by_output"]]
        name = f"{cell['system']}, {cell['text']} T={cell['temperature']:g} n={cell['nodes']}"
        rows.append((name, *lengths, *[""] * (widest - len(lengths))))
    return figures(("acceptance length from output token", *(str(SPAN * i) for i in range(widest))), rows)


def all_cells(
    builder: Builder,
    wanted: Sequence[tuple[str, dict[str, Any]]],
    texts: dict[str, TokenIds],
    grid: Sequence[tuple[str, float, int]],
    sizes: tuple[int, int],
) -> Iterator[Cell]:
    """Measures all methods at each text, temperature and number of nodes of ``grid``.

    Raises RuntimeError if a greedy text differs from that of plain decoding.
    """
    console, none = wide_console(), {"method": "none"}
    greedy = {text for text, temperature, _ in grid if temperature == 0.0}
    plain = {text: measure(builder, none, 0, texts[text], 0.0, sizes)[1] for text in greedy}
    for name, config in track(wanted, "methods", console=console, transient=True):
        try:
            builder.build(SpeculativeConfig.of(config))
        except (ForetokenError, ModuleNotFoundError, NotImplementedError) as error:
            console.print(f"{name}: skipped, {error}", style="yellow")
            continue
        for text, temperature, nodes in grid:
            cell, written = measure(builder, config, nodes, texts[text], temperature, sizes)
            if temperature == 0.0 and builder.target.batch_invariant and written != plain[text]:
                raise RuntimeError(f"{name} at {nodes} nodes changed the greedy text of {text}")
            place = {"system": name, "config": config, "nodes": nodes, "text": text, "temperature": temperature}
            yield place | cell


def main(
    target: Annotated[Path | None, typer.Option(help="Default: the bundled one.")] = None,
    draft: Draft = None,
    other_draft: Annotated[Path | None, typer.Option(help="A draft with a tokenizer of its own.")] = None,
    datastore: Annotated[Path | None, typer.Option(help="Of foretoken build-datastore.")] = None,
    config: Annotated[list[str], typer.Option(help="Speculative configurations as JSON instead of all methods.")] = [],
    prompts: Prompts = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each completion.")] = 128,
    nodes: Annotated[list[int], typer.Option(min=1, help="Of a draft; may be repeated.")] = [4, 8, 16],
    temperature: Temperatures = [0.0, 1.0],
    context: Annotated[list[int], typer.Option(min=1, help="Tokens of an excerpt; may be repeated.")] = [128],
    batch: Annotated[int, typer.Option(min=1)] = 8,
    dtype: Annotated[str, typer.Option(help="Of all models.")] = "auto",
    output: Output = None,
) -> None:
    """Measures tokens per pass of the target: methods by text, temperature and nodes of a draft."""
    torch.set_num_threads(cores())
    path = target_path(target, small=True)
    longest = max(4096, max(context) + tokens + max(nodes))
    load, tokenizer = partial(load_model, dtype=dtype, max_length=longest), load_tokenizer(path)
    builder = Builder(load(path), tokenizer, path, load)
    texts: dict[str, TokenIds] = {
        "prompts": [tokenizer.encode(text, add_special_tokens=False) for text in prompts_or_functions(prompts, count)],
    }
    for length in context:
        name = "library" if len(context) == 1 else f"library of {length}"
        texts[name] = cuts(standard_library().held_out, tokenizer, count, length, tokens)
    files = [str(file) if file else None for file in (other_draft, datastore)]
    chosen = list(systems(config, str(draft or zoo.path("draft")), *files))
    grid = list(product(texts, temperature, nodes))
    cells = list(all_cells(builder, chosen, texts, grid, (tokens, batch)))
    facts = {"target": path.name, "count": count, "tokens": tokens, "batch": batch, "dtype": dtype}
    tables = [table(cells, grid)]
    if len(context) > 1 or tokens > SPAN:
        tables.append(by_output(cells))
    report(tables, facts, output, cells=cells)


if __name__ == "__main__":
    typer.run(main)
