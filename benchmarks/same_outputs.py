"""Random requests to real models: are the outputs those of another version?

    PYTHONPATH=../before/src python benchmarks/same_outputs.py --save before.json
    python benchmarks/same_outputs.py --compare before.json

Prompts and parameters are those of ``request_fuzz.py``, in batches of ten, half of them with drafts. Tokens, text,
log-probabilities to the last bit, reasons of an end and errors are compared. The exit code is 1 if any differs.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from foretoken import LLM
from foretoken.bench.output import report, wide_console
from foretoken.zoo.real import REAL_MODELS
from options import model_path
from request_fuzz import Case, random_case, run

BATCH = 10
METHODS = ("ngram", "suffix", "recycling")


def cases(seed: int, vocabulary: int) -> list[Case]:
    """Returns one batch. Nothing in it depends on how many steps a text takes."""
    rng = random.Random(seed)
    batch = [replace(random_case(rng, vocabulary), arrives=0, abort_after=None) for _ in range(BATCH)]
    for case in batch:
        case.params.pop("explain", None)
        case.params["speculative_method"] = rng.choice(METHODS)
        case.params.setdefault("speculative_tokens", 0)
    return batch


def outputs(model: str, pairs: int) -> list[Any]:
    """Returns prompt, parameters and outputs of each request, as JSON has them."""
    llm = LLM(model_path(model), methods=METHODS, max_model_len=2048)
    found = []
    for seed in track(range(-(-pairs // BATCH)), model, transient=True):
        batch = cases(seed, llm.target.vocab_size)
        for case, results in zip(batch, run(llm, batch), strict=True):
            texts = [[each.error, each.tokens, repr(each.logprobs), repr(each.final)] for each in results]
            found.append([repr(case.prompt), repr(case.params), texts])
    return found


def main(
    save: Annotated[Path | None, typer.Option(help="Write the outputs here.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Compare with outputs that --save wrote.")] = None,
    model: Annotated[list[str], typer.Option(help="Real models or paths; may be repeated.")] = list(REAL_MODELS),
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of prompt and parameters per model.")] = 1_000,
) -> None:
    """Saves the outputs of random requests, or compares them with saved ones."""
    if (save is None) == (compare is None):
        raise typer.BadParameter("give either --save or --compare")
    console, differences = wide_console(), 0
    before = {} if compare is None else json.loads(compare.read_text(encoding="utf-8"))
    after = {name: outputs(name, pairs) for name in model}
    if save is not None:
        save.write_text(json.dumps(after), encoding="utf-8")
    for name, found in after.items() if compare is not None else ():
        known = before[name]
        differing = [(old, new) for old, new in zip(known, found, strict=False) if old != new]
        for old, new in differing[:3]:
            console.print(f"DIFFERENT: {json.dumps(new)[:1500]}\nbefore: {json.dumps(old[-1])[:1500]}", markup=False)
        console.print(f"{name}: {len(differing)} of {min(len(known), len(found))} pairs differ")
        differences += len(differing)
    report([], {}, None)
    raise typer.Exit(1 if differences else 0)


if __name__ == "__main__":
    typer.run(main)
