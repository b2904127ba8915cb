"""Does vLLM load the quantized folders that are written here, and write the text that we write?

    python benchmarks/vllm_folders.py --scheme int8 --scheme int4-g64 --output folders.json

`foretoken quantize` writes the bundled target, widened to 0.7b unless ``--small``; vLLM's CPU build (`make peers`) and
Foretoken load the same folder and continue the same prompts greedily. Both round activations, each in its own way, so
texts part where two tokens are nearly equal; bf16, where nothing is quantized, shows how often that is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.bench.output import listing, report
from foretoken.bench.peers.protocol import PeerRequest, Setup
from foretoken.bench.peers.registry import OURS, PEERS
from foretoken.bench.peers.worker import PeerError, start
from foretoken.bench.setting import cores
from foretoken.bench.workloads import FUNCTIONS
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.quantize import quantize_checkpoint
from options import Output, Small, target_path

BF16 = "bf16"
COLUMNS = {
    "weights": "{scheme}",
    "texts": "{texts}",
    "equal": "{equal}",
    "mean equal tokens": "{agreed:.1f}",
    "error": "{error}",
}


def written(system: str, target: str, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Returns the greedy text of each prompt, one at a time. Raises PeerError if the system cannot load it."""
    with closing(start(Setup(system, "plain", target, threads=cores()))) as worker:
        return [worker.answer(PeerRequest([ids], max_tokens)).tokens[0] for ids in prompts]


def agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the number of leading tokens that are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def main(
    scheme: Annotated[list[str], typer.Option(help="May be repeated.")] = ["int8", "int4-g32", "int4-g64", "int4-g128"],
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=1)] = 32,
    small: Small = False,
    output: Output = None,
) -> None:
    """Prints a row for each folder; exits with 1 where vLLM cannot load one."""
    if PEERS["vllm"].missing:
        raise SystemExit("vLLM is not set up; `make peers PEERS=vllm` does it")
    source = target_path(None, small)
    tokenizer = load_tokenizer(source)
    prompts = [list(tokenizer.encode(text)) for text in FUNCTIONS[:count]]
    rows: list[dict[str, Any]] = []
    for name in [BF16, *scheme]:
        with tempfile.TemporaryDirectory() as temporary:
            place = source if name == BF16 else Path(temporary) / name
            if name != BF16:
                quantize_checkpoint(str(source), place, name)
            ours = written(OURS.name, str(place), prompts, max_tokens)
            try:
                theirs = written("vllm", str(place), prompts, max_tokens)
            except PeerError as error:
                rows.append({"scheme": name, "error": str(error).strip().splitlines()[-1]})
                continue
        lengths = [agreed(*pair) for pair in zip(ours, theirs, strict=True)]
        equal, mean = lengths.count(max_tokens), sum(lengths) / len(lengths)
        rows.append({"scheme": name, "texts": len(prompts), "equal": equal, "agreed": mean})
    facts = {"target": source.name, "max_tokens": max_tokens}
    report([listing(COLUMNS, rows)], facts, output, rows=rows)
    raise typer.Exit(any("error" in row for row in rows))


if __name__ == "__main__":
    typer.run(main)
