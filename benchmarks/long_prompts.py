"""Long prompts in every engine: seconds to the first token, of a pass behind the prompt, and resident memory.

    python benchmarks/long_prompts.py --tokens 2000 --repeats 5
    python benchmarks/long_prompts.py --tokens 32768 --repeats 1 --peers vllm,llamacpp     # minutes a prompt

The target's weights are linked into a folder whose config.json allows that many positions, since neither the time nor
the memory of a prompt depends on what the positions were trained for. Engines take turns, each in a process of its own;
where memory does not hold all of them, they are loaded again. No prefix cache is used.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from foretoken import zoo
from foretoken.bench.entrants import Pairing, own, peers
from foretoken.bench.output import figures, report
from foretoken.bench.peers.protocol import PeerRequest, Setup
from foretoken.bench.peers.registry import chosen
from foretoken.bench.peers.worker import PeerError, start
from foretoken.bench.pool import Pool
from foretoken.models.formats.checkpoint import load_config
from options import Output, Target, target_path


@dataclass(frozen=True)
class PromptTime:
    """One engine's time of one prompt length.

    Attributes:
        seconds: to the first token, the median of all turns.
        pass_seconds: of a plain pass behind the prompt, the median of all turns.
        memory_bytes: resident, the largest of all turns.
    """

    system: str
    version: str
    tokens: int
    seconds: float
    pass_seconds: float
    memory_bytes: int


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


def times(setups: list[Setup], tokens: int, repeats: int, passes: int) -> list[PromptTime]:
    """Times the first token after ``tokens`` tokens, and ``passes`` further tokens, in every engine, by turns."""
    turns = setups * repeats
    seconds: dict[str, list[float]] = {}
    later: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    versions: dict[str, str] = {}
    failed: dict[str, str] = {}
    with closing(Pool(start, turns)) as pool:
        for number, setup in enumerate(track(turns, f"{tokens} tokens")):
            if setup.system in failed:
                continue
            prompt = [(7 * i + number) % 4000 + 5 for i in range(tokens)]
            try:
                worker = pool.get(number)
                worker.answer(PeerRequest([prompt[: tokens // 8 + 1]], 1))  # a new process compiles first
                answer = worker.answer(PeerRequest([prompt], passes + 1))
            except PeerError as error:
                failed[setup.system] = str(error)
                continue
            decoding = (answer.seconds - answer.first_seconds) / (answer.total - answer.first_tokens)
            # at once, since a turn may take minutes
            print(f"{setup.system}: {answer.first_seconds:.2f} s, {1e3 * decoding:.1f} ms a pass", flush=True)
            seconds.setdefault(setup.system, []).append(answer.first_seconds)
            later.setdefault(setup.system, []).append(decoding)
            memory[setup.system] = max(memory.get(setup.system, 0), worker.resident_bytes)
            versions[setup.system] = worker.version
    for name, reason in failed.items():
        print(f"{name} is left out: {reason}")
    return [
        PromptTime(name, versions[name], tokens, median(each), median(later[name]), memory[name])
        for name, each in seconds.items()
    ]


def table(rows: list[PromptTime]) -> Table:
    """Returns a line for each engine and length."""
    heads = ("system", "prompt", "first token, s", "tokens/s", "a pass, ms", "memory, MB")
    lines = []
    for row in rows:
        speed = f"{row.seconds:.2f}", f"{row.tokens / row.seconds:.0f}", f"{1e3 * row.pass_seconds:.1f}"
        lines.append((f"{row.system} {row.version}", row.tokens, *speed, f"{row.memory_bytes / 1e6:.0f}"))
    return figures(heads, lines)


def main(
    target: Target = None,
    tokens: Annotated[list[int], typer.Option(min=1, help="Of a prompt; may be repeated.")] = [2000],
    repeats: Annotated[int, typer.Option(min=1, help="Turns of every engine.")] = 3,
    passes: Annotated[int, typer.Option(min=1, help="Tokens after the first, each of a pass.")] = 8,
    systems: Annotated[str, typer.Option("--peers", help="Comma-separated, or none.")] = "openvino,vllm,llamacpp",
    output: Output = None,
) -> None:
    """Times long prompts in every engine."""
    where, rows = target_path(target), list[PromptTime]()
    with TemporaryDirectory() as folder:
        for count in dict.fromkeys(tokens):
            longest = count + 64
            pairing = Pairing(stretched(where, longest, Path(folder)), zoo.path("draft"), (1,), max_length=longest)
            entrants = own(pairing, [{"method": "ngram"}]) + peers(
                pairing, [{"method": "ngram"}], chosen(systems), print
            )
            plain = [entrant.setup for entrant in entrants if entrant.method == "plain"]
            rows += times(plain, count, repeats, passes)
    facts = {"target": where.name, "repeats": repeats, "passes": passes}
    report([table(rows)], facts, output, prompts=[asdict(row) for row in rows])


if __name__ == "__main__":
    typer.run(main)
