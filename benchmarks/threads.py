"""Engines that share their cores: with each other, with a busy program, and under a CPU quota.

Each engine is a process of its own. It writes the same greedy text in every case, and the texts are compared.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

from foretoken.bench.output import busy_programs, cores, listing, report
from foretoken.bench.peers.protocol import PeerRequest, Setup
from foretoken.bench.peers.registry import OURS, folder
from foretoken.bench.peers.worker import PeerWorker
from foretoken.models.formats.checkpoint import load_tokenizer
from options import Output, Repeats, Target, target_path

PROMPT = "import os\n\n\ndef read(path):\n"
GROUPS = Path("/sys/fs/cgroup/cpu")  # version 1
PERIOD = 100_000  # microseconds
ALONE, BOTH, SINGLE = "alone", "two at once", "one thread"
QUOTA, BUSY = "a quota of one processor", "beside a busy program"
BASES = {BOTH: ALONE, BUSY: ALONE, QUOTA: SINGLE}  # the case that a case is compared with


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


def engine(model: Path, threads: int, group: Path | None = None) -> PeerWorker:
    """Starts an engine, in a control group if there is one. threads: 0 for as many as it takes by itself."""
    joining = f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))} && " if group is not None else ""
    command = ["sh", "-c", f"{joining}exec {shlex.join(OURS.command())}"]
    log = folder() / "logs" / f"threads-{threads}-{os.getpid()}.log"
    return PeerWorker(command, Setup(OURS.name, "plain", str(model), threads=threads), log)


def measure(model: Path, threads: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Returns tokens per second of each case, in turns, and the number of different texts."""
    rates: dict[str, list[float]] = {}
    texts: set[tuple[int, ...]] = set()
    request = PeerRequest([list(load_tokenizer(model).encode(PROMPT))], tokens)

    def note(name: str, engines: Sequence[PeerWorker]) -> None:
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda each: each.answer(request), engines))
        rates.setdefault(name, []).append(sum(answer.total / answer.seconds for answer in answers))
        texts.update(tuple(answer.tokens[0]) for answer in answers)

    with ExitStack() as stack:
        group = stack.enter_context(quota_of_one())
        start = lambda *options: stack.enter_context(closing(engine(model, *options)))  # noqa: E731
        first, second, single = start(threads), start(threads), start(1)
        limited = [start(0, group)] if group is not None else []
        for each in (first, second, single, *limited):
            each.answer(PeerRequest(request.prompts, 2))
        for _ in range(repeats):
            note(ALONE, [first])
            note(BOTH, [first, second])
            note(SINGLE, [single])
            if limited:
                note(QUOTA, limited)
            with busy_programs(1):
                note(BUSY, [first])
    medians = {name: median(values) for name, values in rates.items()}
    ratios = {name: rate / medians[BASES[name]] for name, rate in medians.items() if name in BASES}
    return {"tokens_per_second": medians, "all": rates, "ratios": ratios, "texts": len(texts)}


def main(
    model: Target = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of an engine. [all cores]")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text.")] = 64,
    repeats: Repeats = 3,
    output: Output = None,
) -> None:
    """Time engines that share their cores, in turns with one that has them alone."""
    path, count = target_path(model), threads or cores()
    record = measure(path, count, tokens, repeats)
    rates, ratios = record["tokens_per_second"], record["ratios"]
    parts: list[Table | str] = [
        listing(
            {"case": "{case}", "tokens/s": "{rate:.1f}", "ratio": "{ratio:.2f}"},
            [{"case": name, "rate": rate, "ratio": ratios.get(name)} for name, rate in rates.items()],
        ),
        "the same text in every case" if record["texts"] == 1 else f"{record['texts']} different texts",
    ]
    if QUOTA not in rates:
        parts.append("no quota: this needs control groups of version 1 and the right to make one")
    report(parts, {"model": path.name, "threads": count}, output, **record)
    raise typer.Exit(record["texts"] != 1)


if __name__ == "__main__":
    typer.run(main)
