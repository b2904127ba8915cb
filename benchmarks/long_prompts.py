"""Long prompts in every engine: seconds to the first token, of a pass behind the prompt, and resident memory.

    python benchmarks/long_prompts.py --tokens 2000 --repeats 5
    python benchmarks/long_prompts.py --tokens 32768 --repeats 1 --peers vllm,llamacpp     # minutes a prompt

The target's weights are linked into a folder whose config.json allows that many positions, since neither the time nor
the memory of a prompt depends on what the positions were trained for. Engines race in plain decoding, each in a process
of its own; where memory does not hold all of them, they are loaded again. No prefix cache is used.
"""

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.progress import track

from foretoken import zoo
from foretoken.bench.output import listing, report
from foretoken.bench.peers.registry import chosen
from foretoken.bench.peers.worker import start
from foretoken.bench.race import Pairing, RaceTask, own, peers, race
from foretoken.models.formats.checkpoint import load_config
from options import Output, Target, target_path

COLUMNS = {
    "system": "{system} {version}",
    "prompt": "{tokens}",
    "first token, s": "{prefill_seconds:.2f}",
    "tokens/s": "{prompt_rate:.0f}",
    "a pass, ms": "{pass_ms:.1f}",
    "memory, MB": "{megabytes:.0f}",
}


def stretched(target: Path, positions: int, folder: Path) -> Path:
    """Returns the target; if it has fewer than ``positions`` positions, a checkpoint in ``folder`` with its weights."""
    config = load_config(target)
    if config["max_position_embeddings"] >= positions:
        return target
    where = folder / f"{target.name}-{positions}"
    where.mkdir()
    for file in target.iterdir():
        if file.is_file() and file.name != "config.json":
            (where / file.name).symlink_to(file)
    (where / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}), encoding="utf-8")
    return where


def times(target: Path, systems: str, tokens: int, repeats: int, passes: int) -> list[dict[str, Any]]:
    """Times the first token after ``tokens`` tokens, and ``passes`` further tokens, in every engine, by turns."""
    pairing, lookup = Pairing(target, zoo.path("draft"), (1,), max_length=tokens + 64), [{"method": "ngram"}]
    entrants = own(pairing, lookup) + peers(pairing, lookup, chosen(systems), print)
    prompt = [(7 * i) % 4000 + 5 for i in range(tokens)]
    task = RaceTask([[prompt]], passes + 1, 0.0, warm_up=[prompt[: tokens // 8 + 1]])  # a new process compiles first
    plain = [entrant for entrant in entrants if entrant.method == "plain"]
    rows, _ = race(plain, [task], repeats, start, print, lambda order: track(order, f"{tokens} tokens"))
    return [
        {
            **asdict(row),
            "tokens": tokens,
            "prompt_rate": tokens / row.prefill_seconds,
            "pass_ms": 1e3 / row.decode_tokens_per_second,
            "megabytes": row.resident_bytes / 1e6,
        }
        for row in rows
    ]


def main(
    target: Target = None,
    tokens: Annotated[list[int], typer.Option(min=1, help="Of a prompt; may be repeated.")] = [2000],
    repeats: Annotated[int, typer.Option(min=1, help="Turns of every engine.")] = 3,
    passes: Annotated[int, typer.Option(min=1, help="Tokens after the first, each of a pass.")] = 8,
    systems: Annotated[str, typer.Option("--peers", help="Comma-separated, or none.")] = "openvino,vllm,llamacpp",
    output: Output = None,
) -> None:
    """Times long prompts in every engine."""
    where, rows = target_path(target), list[dict[str, Any]]()
    with TemporaryDirectory() as folder:
        for count in dict.fromkeys(tokens):
            rows += times(stretched(where, count + 64, Path(folder)), systems, count, repeats, passes)
    report([listing(COLUMNS, rows)], {"target": where.name, "repeats": repeats}, output, prompts=rows)


if __name__ == "__main__":
    typer.run(main)
