"""Engines that share their cores: with each other, with a busy program, and under a CPU quota.

Each engine is a process of its own. It writes the same greedy text in every case, and the texts are compared.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.table import Table

from foretoken.bench.output import figures, report
from foretoken.bench.setting import busy_programs, cores
from options import AsJson, Output, Repeats, Target, target_path

PROMPT = "import os\n\n\ndef read(path):\n"
GROUPS = Path("/sys/fs/cgroup/cpu")  # version 1
PERIOD = 100_000  # microseconds


class EngineProcess:
    """An engine in a process of its own. ``threads``: None for as many as it takes by itself."""

    def __init__(self, model: Path, threads: int | None, group: Path | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, model, threads, group), daemon=True)
        self._process.start()
        self.threads: int = self._pipe.recv()

    def start(self, tokens: int) -> None:
        self._pipe.send(tokens)

    def result(self) -> tuple[float, str]:
        """Returns tokens per second and a digest of the text."""
        rate, digest = self._pipe.recv()
        return rate, digest

    def close(self) -> None:
        self._pipe.send(0)
        self._process.join()


def serve(pipe: Connection, model: Path, threads: int | None, group: Path | None) -> None:
    """Writes a text for each number of tokens that it receives, until 0."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    import torch

    from foretoken import LLM, SamplingParams

    if threads is not None:
        torch.set_num_threads(threads)
    llm = LLM(str(model), dtype="bfloat16", device="cpu")
    llm.generate(PROMPT, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    pipe.send(torch.get_num_threads())
    while tokens := pipe.recv():
        started = perf_counter()
        (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
        seconds = perf_counter() - started
        ids = output.outputs[0].token_ids
        pipe.send((len(ids) / seconds, hashlib.sha256(repr(list(ids)).encode()).hexdigest()[:12]))


@contextmanager
def quota_of_one() -> Iterator[Path | None]:
    """A control group with a quota of one processor; None if it cannot be made."""
    group = GROUPS / f"foretoken-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(PERIOD))
        yield group
    finally:
        group.rmdir()


def together(engines: list[EngineProcess], tokens: int) -> tuple[list[float], set[str]]:
    """Returns tokens per second of engines that write at the same time, and their texts."""
    for engine in engines:
        engine.start(tokens)
    results = [engine.result() for engine in engines]
    return [rate for rate, _ in results], {digest for _, digest in results}


def measure(model: Path, threads: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Returns tokens per second of each case, in turns, and the number of different texts."""
    cases = ["alone", "two at once", "one thread", "a quota of one processor", "beside a busy program"]
    rates: dict[str, list[float]] = {name: [] for name in cases}
    texts: set[str] = set()

    def note(name: str, engines: list[EngineProcess]) -> None:
        values, digests = together(engines, tokens)
        rates[name].append(sum(values))
        texts.update(digests)

    with ExitStack() as stack:
        group = stack.enter_context(quota_of_one())
        engines = [EngineProcess(model, threads), EngineProcess(model, threads)]
        single = EngineProcess(model, 1)
        limited = EngineProcess(model, None, group) if group is not None else None
        every = [engine for engine in (*engines, single, limited) if engine is not None]
        for engine in reversed(every):
            stack.callback(engine.close)
        for _ in range(repeats):
            note("alone", engines[:1])
            note("two at once", engines)
            note("one thread", [single])
            if limited:
                note("a quota of one processor", [limited])
            with busy_programs(1):
                note("beside a busy program", engines[:1])
        quota_threads = limited.threads if limited else None
    return {
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items() if values},
        "all": rates,
        "texts": len(texts),
        "threads_under_the_quota": quota_threads,
    }


def ratios(rates: dict[str, float]) -> dict[str, float]:
    """Returns each case over what it is compared with."""
    result = {name: rates[name] / rates["alone"] for name in ("two at once", "beside a busy program")}
    if (limited := rates.get("a quota of one processor")) is not None:
        result["a quota of one processor"] = limited / rates["one thread"]
    return result


def main(
    model: Target = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of an engine. [all cores]")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text.")] = 64,
    repeats: Repeats = 3,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Time engines that share their cores, in turns with one that has them alone."""
    path, count = target_path(model), threads or cores()
    record = measure(path, count, tokens, repeats)
    rates = record["tokens_per_second"]
    record["ratios"] = ratios(rates)
    cells = [(name, f"{rate:.1f}", _times(record["ratios"].get(name))) for name, rate in rates.items()]
    parts: list[Table | str] = [
        figures(("case", "tokens/s", "ratio"), cells),
        "the same text in every case" if record["texts"] == 1 else f"{record['texts']} different texts",
    ]
    if "a quota of one processor" not in rates:
        parts.append("no quota: this needs control groups of version 1 and the right to make one")
    report(parts, {"model": path.name, "threads": count}, output, as_json, **record)
    if record["texts"] != 1:
        raise typer.Exit(1)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


if __name__ == "__main__":
    typer.run(main)
