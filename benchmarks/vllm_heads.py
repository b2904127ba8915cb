"""Do heads that were trained here work in vLLM with the same acceptance? Chains, greedy.

    python benchmarks/vllm_heads.py --prompts humaneval.jsonl --output heads.json
    python benchmarks/vllm_heads.py --heads dspark=HEAD --heads peagle=HEAD

The bundled heads, or those that are named, are converted with `foretoken convert --to vllm` and loaded by vLLM's CPU
build (`make peers`) with the bundled target. Compared are tokens per pass of the target on the same prompts. Greedy
texts in bf16 diverge after some tokens, so the figures differ slightly. Block drafters draft their whole block, which
vLLM would compute shorter otherwise. vLLM runs DSpark's kernels on CPUs in Triton's interpreter, a second a pass. Our
MTP layers load in vLLM only beside a Qwen3.5 target, so they are skipped.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from foretoken import zoo
from foretoken.bench.output import listing, report
from foretoken.bench.peers.protocol import PeerRequest, Setup
from foretoken.bench.peers.worker import start
from foretoken.bench.setting import cores
from foretoken.bench.workloads import prompts_or_functions
from foretoken.cli.convert import convert
from foretoken.models.formats.checkpoint import load_config, load_tokenizer
from options import Output, Prompts

ROLES = ("eagle3", "peagle", "dflash", "dspark", "medusa")
COLUMNS = {
    "heads": "{heads}",
    "depth": "{depth}",
    "foretoken tokens/pass": "{ours:.2f}",
    "vLLM tokens/pass": "{vllm:.2f}",
    "ratio": "{ratio:.3f}",
}
_AT_ONCE = (("parallel_drafting", "true"),)


def heads_of(given: list[str]) -> dict[str, Path]:
    """Returns folders of heads by their kind: those given as KIND=FOLDER, or the bundled ones."""
    if not given:
        return {model.role: zoo.path(model.role) for model in zoo.list_models() if model.role in ROLES}
    named = dict(each.partition("=")[::2] for each in given)
    if other := sorted(set(named) - set(ROLES)):
        raise typer.BadParameter(f"{other[0]!r} is no kind of heads; known: {', '.join(ROLES)}")
    return {role: Path(path).expanduser().absolute() for role, path in named.items()}


def compared(
    role: str, heads: Path, prompts: list[list[int]], max_tokens: int, depth: int, scratch: Path
) -> dict[str, Any]:
    """Returns tokens per pass of heads in both engines."""
    target, converted = zoo.path("target"), scratch / role
    convert(heads, converted, to="vllm", target=str(target), force=True)
    block = load_config(heads).get("block_size")
    depth = depth if block is None else block - (role == "dflash")
    method, options = ("eagle3", _AT_ONCE) if role == "peagle" else (role, ())
    chain = (("method", json.dumps(method)), ("top_k", "1"))
    ours = Setup("foretoken", method, str(target), str(heads), threads=cores(), options=chain)
    theirs = Setup("vllm", method, str(target), str(converted), depth=depth, threads=cores(), options=options)
    own, other = (tokens_per_pass(each, prompts, max_tokens, depth) for each in (ours, theirs))
    return {"heads": role, "depth": depth, "ours": own, "vllm": other, "ratio": other / own}


def tokens_per_pass(setup: Setup, prompts: list[list[int]], max_tokens: int, depth: int) -> float:
    """Returns tokens per pass, without each prompt's first pass, which has no draft in either system."""
    with closing(start(setup)) as worker:
        answers = [
            worker.answer(PeerRequest([ids], max_tokens, depth=depth))
            for ids in track(prompts, f"{setup.system} {setup.method}")
        ]
    return sum(a.total - 1 for a in answers) / sum(a.passes - 1 for a in answers)


def main(
    heads: Annotated[list[str] | None, typer.Option(help="KIND=FOLDER, repeatable. [the bundled ones]")] = None,
    prompts: Prompts = None,
    count: Annotated[int, typer.Option(min=1)] = 24,
    max_tokens: Annotated[int, typer.Option(min=2)] = 96,
    depth: Annotated[int, typer.Option(min=1)] = 4,
    output: Output = None,
) -> None:
    """Compares mean acceptance lengths of the same heads here and in vLLM; exit code 1 if they differ by over 5 %."""
    tokenizer = load_tokenizer(zoo.path("target"))
    ids = [list(tokenizer.encode(text)) for text in prompts_or_functions(prompts, count)]
    with tempfile.TemporaryDirectory() as scratch:
        given = heads_of(heads or []).items()
        rows = [compared(role, path, ids, max_tokens, depth, Path(scratch)) for role, path in given]
    report([listing(COLUMNS, rows)], {"max_tokens": max_tokens}, output, rows=rows)
    raise typer.Exit(any(abs(row["ratio"] - 1) > 0.05 for row in rows))


if __name__ == "__main__":
    typer.run(main)
