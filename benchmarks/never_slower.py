"""Never slower: proposers that are no good, under the guard, beside plain decoding.

    python benchmarks/never_slower.py --output never_slower.json
    python benchmarks/never_slower.py --small --batch 1 --proposer random

random: a draft model of random weights. over-large: the target as its own draft. wrong: an EAGLE-3 head whose weights
were shuffled. Every repeat begins with a draft policy that knows nothing. The same requests run in two engines over one
target, in turns of a step or a prefill chunk, so that a machine whose speed drifts is as slow for one as for the other;
both are end to end, prompts included, end-of-text ignored. A ratio is guarded over plain tokens per second over all
batches of a repeat; of a cell, the repeats' median.
"""

import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.output import cores, listing, progress, report
from foretoken.bench.workloads import FUNCTIONS
from foretoken.control.base import Controller
from foretoken.control.config import build
from foretoken.control.policy import DraftPolicy
from foretoken.engine.loop import Engine
from foretoken.engine.warmup import warm_up
from foretoken.propose.base import Proposer
from foretoken.propose.union import Union
from options import Output, Repeats, Small, Temperatures, target_path
from systems import System, Totals, Workload, take_turns

PROSE = (
    "The harbour was quiet that morning. Two boats had come in before dawn, and the men who had been out on them sat "
    "on the wall with their hands around their cups, saying nothing, while the gulls",
    "When people speak of the history of the town they usually begin with the fire, because so little was left after "
    "it that anybody could point to. But the older families remember",
    "It is often said that a good letter writes itself. Mine did not. I began it on Monday, put it aside on Tuesday, "
    "and by the end of the week there were eleven first sentences on my desk, of which",
    "Bread needs four things and patience: flour, water, salt and something that lives. The flour decides how much "
    "water it will take, and the weather decides how long",
)
REPETITION = (
    "".join(f"    assert add({i}, {i + 1}) == {2 * i + 1}\n" for i in range(12)),
    "north east south west " * 24,
    "".join(f"    'item_{i}': Item(name='item_{i}', price={i * 7 % 50}),\n" for i in range(12)),
    "x = 0\n" * 40,
)
TEXTS = {"prose": PROSE, "code": FUNCTIONS, "repetition": REPETITION}
GUARDED, PLAIN = "guarded", "plain"
PROPOSERS = ("random", "over-large", "wrong")
COLUMNS = {
    "proposer": "{proposer}",
    "text": "{text}",
    "temperature": "{temperature:g}",
    "batch": "{batch}",
    "plain tok/s": "{plain:.1f}",
    "guarded tok/s": "{guarded:.1f}",
    "ratio": "{ratio:.3f}",
    "lowest": "{lowest:.3f}",
    "drafted per token": "{drafted:.2f}",
}
PIECE = 256  # prompt tokens of one step; sixteen whole prompts would take many seconds


def random_draft(folder: Path) -> Path:
    """Writes the bundled draft with random weights of the same sizes. Returns its folder."""
    return _with_weights(zoo.path("draft"), folder, lambda w, g: torch.randn(w.shape, generator=g) * w.float().std())


def wrong_head(head: Path, folder: Path) -> Path:
    """Writes a head with the entries of every matrix shuffled; norms and tables of ids stay. Returns its folder."""

    def shuffled(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return weight.flatten()[torch.randperm(weight.numel(), generator=generator)].view(weight.shape)

    return _with_weights(head, folder, shuffled)


def _with_weights(source: Path, folder: Path, change: Any) -> Path:
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if weight.ndim > 1 and weight.is_floating_point():
            tensors[name] = change(weight, generator).to(weight.dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def configuration(proposer: str, target: Path, folder: Path) -> dict[str, Any]:
    if proposer == "random":
        return {"method": "draft_model", "model": str(random_draft(folder / "draft"))}
    if proposer == "over-large":
        return {"method": "draft_model", "model": str(target)}
    from foretoken.train.widen.heads import scaled_head

    head = zoo.path("eagle3") if target == zoo.path("target") else scaled_head("eagle3", target)
    return {"method": "eagle3", "model": str(wrong_head(head, folder / "head"))}


def begun(llm: LLM, batch: int) -> dict[str, System]:
    """Returns both systems on one set of models, with a draft policy in its state after the warm-up."""
    config, target, policy = llm.speculative_config, llm.target, DraftPolicy()
    union = llm.engine.proposer
    assert isinstance(union, Union)
    warm_up(target, union, policy.costs, config.max_tokens)
    engine = partial(Engine, target, max_sequences=batch, prompt_rows=PIECE)
    controller = build(config.control_in_force, config.max_tokens, target.device, policy)
    guarded = engine(Union(union.sources, policy, union.name), controller)
    return {GUARDED: System(llm, guarded), PLAIN: System(llm, engine(Proposer(), Controller()))}


def cell(
    llm: LLM, proposer: str, text: str, temperature: float, batch: int, tokens: int, requests: int, repeats: int
) -> dict[str, Any]:
    """Runs plain and guarded decoding in turns of a step.

    ratios: guarded over plain tokens per second, by repeat. drafted: draft tokens per token.
    """
    prompts, order = cycle(TEXTS[text]), random.Random(0)
    groups = [list(islice(prompts, batch)) for _ in range(requests)]
    params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
    take_turns(begun(llm, batch), Workload(text, groups[0], replace(params, max_tokens=8)), 1, order)
    runs: list[dict[str, Totals]] = []
    for _ in range(repeats):
        systems, sums = begun(llm, batch), {GUARDED: Totals(), PLAIN: Totals()}
        for group in groups:
            both = take_turns(systems, Workload(text, group, params), 1, order)
            sums = {name: sums[name] + both[name] for name in sums}
        runs.append(sums)
    plain, fast = (median(sums[name].speed for sums in runs) for name in (PLAIN, GUARDED))
    ratios = [sums[GUARDED].speed / sums[PLAIN].speed for sums in runs]
    drafted = sum((sums[GUARDED] for sums in runs), Totals())
    place = {"proposer": proposer, "text": text, "temperature": temperature, "batch": batch}
    place |= {"plain": plain, "guarded": fast, "drafted": drafted.drafted / drafted.tokens}
    return place | {"ratios": ratios, "ratio": median(ratios), "lowest": min(ratios)}


def cells(
    target: Path, proposers: Sequence[str], grid: Sequence[tuple[str, float, int]], sizes: tuple[int, int, int]
) -> Iterator[dict[str, Any]]:
    """Yields all cells. Models are loaded once for each proposer."""
    for proposer in proposers:
        with tempfile.TemporaryDirectory() as folder:
            llm = LLM(target, speculative_config=configuration(proposer, target, Path(folder)), max_model_len=2048)
        for text, temperature, batch in progress(grid, proposer):
            yield cell(llm, proposer, text, temperature, batch, *sizes)
        llm.close()


def main(
    small: Small = False,
    proposer: Annotated[list[str], typer.Option(help=f"Of {', '.join(PROPOSERS)}; may be repeated.")] = list(PROPOSERS),
    text: Annotated[list[str], typer.Option(help=f"Of {', '.join(TEXTS)}; may be repeated.")] = list(TEXTS),
    temperature: Temperatures = [0.0, 1.5],
    batch: Annotated[list[int], typer.Option(help="May be repeated.")] = [1, 4, 16],
    tokens: Annotated[int, typer.Option(min=1, help="Of each request.")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="Batches, one after another.")] = 3,
    repeats: Repeats = 3,
    output: Output = None,
) -> None:
    """Prints tokens per second under the guard over those of plain decoding, for proposers that are useless."""
    torch.set_num_threads(cores())
    for name, known in [(p, PROPOSERS) for p in proposer] + [(t, tuple(TEXTS)) for t in text]:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not known; known: {', '.join(known)}")
    target = target_path(None, small)
    grid = list(product(text, temperature, batch))
    results = list(cells(target, proposer, grid, (tokens, requests, repeats)))
    worst = min(results, key=lambda result: result["ratio"])
    lowest = "lowest ratio {ratio:.3f}: {proposer}, {text}, batch {batch}".format_map(worst)
    facts = {"target": target.name, "tokens": tokens, "requests": requests, "repeats": repeats}
    report([listing(COLUMNS, results), lowest], facts, output, cells=results)


if __name__ == "__main__":
    typer.run(main)
