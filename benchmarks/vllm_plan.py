"""How far is what `foretoken plan --engine vllm` predicts from what vLLM then does, on prompts it has not seen?

    python benchmarks/vllm_plan.py --prompts humaneval.jsonl --json vllm_plan.json

vLLM's CPU build (`make peers`). The plan rests on short runs at a few depths over every other prompt; then the others
are completed at those depths and at some between them, and at last by a fresh vLLM with the configuration that the
plan chose, as its user would start it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from foretoken import zoo
from foretoken.bench.peers.protocol import Ask
from foretoken.bench.peers.vllm_rounds import Rounds
from foretoken.bench.setting import setting, wide_console
from foretoken.bench.workloads import load_prompts
from foretoken.cli.plan_vllm import lanes
from foretoken.models.checkpoint import load_tokenizer
from foretoken.plan.outcome import Row
from foretoken.plan.vllm import PLAIN, Lane, Run, chosen, planned
from foretoken.plan.vllm_runs import Asked, Bench, runs
from foretoken.train.scale_up import scaled

WITHIN = 0.1


class Kept:
    """A process that outlives its plan."""

    def __init__(self, inner: Asked) -> None:
        self.inner = inner

    def rounds(self, question: Ask) -> Rounds:
        return self.inner.rounds(question)

    def close(self) -> None:
        return


class Processes:
    """Every lane's process, started once."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self.bench, self.stack = bench, stack
        self.known: dict[str, Kept] = {}

    def start(self, lane: Lane | None) -> Asked:
        name = lane.name if lane is not None else PLAIN
        if name not in self.known:
            made = self.bench.start(lane)
            self.stack.callback(made.close)
            self.known[name] = Kept(made)
        return self.known[name]


def gain(found: Sequence[Run], lane: str, depth: int, temperature: float) -> tuple[float, float]:
    """Measured: tokens per second of decoding over plain decoding beside it, and tokens per pass."""
    here = [run for run in found if run.temperature == temperature and run.beside == lane]
    plain = next(run for run in here if run.lane == PLAIN)
    own = next(run for run in here if run.lane == lane and run.depth == depth)
    return own.tokens_per_pass * plain.round_seconds / own.round_seconds, own.tokens_per_pass


def compared(row: Row, measured: tuple[float, float], seen: Sequence[int], what: str = "") -> dict[str, Any]:
    """One line of the record. seen: depths that the plan had run."""
    speedup, per_pass = measured
    return {
        "name": what or row.name, "config": dict(row.config), "temperature": row.temperature,
        "num_speculative_tokens": row.num_speculative_tokens, "run_for_the_plan": row.num_speculative_tokens in seen,
        "predicted": row.speedup, "low": row.low, "high": row.high, "measured": speedup,
        "error": row.speedup / speedup - 1, "covered": row.low <= speedup <= row.high,
        "tokens_per_pass": row.tokens_per_pass, "measured_tokens_per_pass": per_pass,
        "tokens_error": row.tokens_per_pass / per_pass - 1,
    }  # fmt: skip


def deepened(known: Sequence[Lane], depths: Sequence[int]) -> Iterator[Lane]:
    """The lanes at ``depths``, as far as the plan speaks of them; and the deepest, which the process is made for."""
    for lane in known:
        inside = [depth for depth in depths if min(lane.depths) <= depth <= max(lane.depths)]
        yield replace(lane, depths=tuple(sorted({*inside, max(lane.depths)})))


def report(rows: Sequence[dict[str, Any]], console: Console) -> dict[str, float]:
    table = Table(box=box.MARKDOWN)
    table.add_column("vLLM")
    for head in (
        "tokens",
        "T",
        "run",
        "predicted",
        "interval",
        "measured",
        "error",
        "tokens/pass",
        "measured ",
        "error ",
    ):
        table.add_column(head, justify="right")
    for r in rows:
        table.add_row(
            r["name"], str(r["num_speculative_tokens"]), f"{r['temperature']:g}",
            "yes" if r["run_for_the_plan"] else "",
            f"{r['predicted']:.2f}", f"{r['low']:.2f}-{r['high']:.2f}{'' if r['covered'] else ' !'}",
            f"{r['measured']:.2f}", f"{r['error']:+.1%}", f"{r['tokens_per_pass']:.2f}",
            f"{r['measured_tokens_per_pass']:.2f}", f"{r['tokens_error']:+.1%}",
        )  # fmt: skip
    console.print(table)
    errors = [abs(r["error"]) for r in rows]
    facts = {
        "pairs": float(len(rows)),
        "median_error": median(errors),
        "largest_error": max(errors),
        "within_10_percent": sum(error <= WITHIN for error in errors) / len(errors),
        "coverage": sum(r["covered"] for r in rows) / len(rows),
    }
    console.print(
        f"{len(rows)} pairs: median error {facts['median_error']:.1%}, largest {facts['largest_error']:.1%}, within "
        f"10 % {facts['within_10_percent']:.0%}, intervals cover {facts['coverage']:.0%}",
        style="bold", highlight=False,
    )  # fmt: skip
    return facts


def main(
    prompts: Annotated[Path, typer.Option(help='JSON lines with a "prompt" each.')],
    scaled_up: Annotated[bool, typer.Option("--scaled", help="The bundled target widened to 0.7 B.")] = False,
    heads: Annotated[list[str], typer.Option(help="Bundled heads besides: eagle3, medusa.")] = [],
    count: Annotated[int, typer.Option(min=2, help="Prompts for the plan, and as many for the measurement.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=8)] = 64,
    temperature: Annotated[list[float], typer.Option(min=0.0)] = [0.0],
    depth: Annotated[list[int], typer.Option(min=1, help="To be measured.")] = [1, 3, 4, 5, 6, 8],
    python: Annotated[Path | None, typer.Option(help="Of vLLM's environment.")] = None,
    engine_args: Annotated[str, typer.Option(metavar="JSON", help="Arguments of vllm.LLM.")] = '{"dtype": "bfloat16"}',
    json_file: Annotated[Path | None, typer.Option("--json", help="Write setting, rows and summary here.")] = None,
) -> None:
    """Plan on some prompts, measure on others, compare."""
    target = scaled("0.7b") if scaled_up else zoo.path("target")
    tokenizer = load_tokenizer(target)
    ids = [list(tokenizer(text)["input_ids"]) for text in load_prompts(prompts, 2 * count)]
    seen, unseen = ids[::2], ids[1::2]
    known = lanes(target, [str(zoo.path("draft"))], [str(zoo.path(role)) for role in heads], [])
    bench = Bench(
        target=str(target),
        temperatures=temperature,
        max_tokens=max_tokens,
        python=python,
        engine=json.loads(engine_args),
    )
    bench.command()
    console = wide_console()
    with ExitStack() as stack, Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=1.0)
        processes = Processes(bench, stack)
        started = perf_counter()
        plan = planned(known, runs(bench, known, seen, lambda what, share: progress.update(
            bar, description=f"plan, {what}", completed=share), processes.start))  # fmt: skip
        seconds = perf_counter() - started
        wider = list(deepened(known, depth))
        found = runs(bench, wider, unseen, lambda what, share: progress.update(
            bar, description=f"unseen, {what}", completed=share), processes.start)  # fmt: skip
        rows = []
        for row in plan.rows:
            lane = next(each for each in wider if each.name == row.name)
            if row.num_speculative_tokens in lane.depths:
                run = next(each for each in known if each.name == row.name).depths
                measured = gain(found, row.name, row.num_speculative_tokens, row.temperature)
                rows.append(compared(row, measured, run))
        if plan.best is not None:
            progress.update(bar, description="the plan's choice, a fresh vLLM", completed=0.0)
            rows += deployed(bench, plan.best, chosen(plan, known), plan.rows, processes, unseen)
    facts = report(rows, console)
    about = setting() | {
        "target": target.name,
        "planned_in_seconds": round(seconds, 1),
        "count": count,
    }
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), style="dim")
    if json_file is not None:
        record = {"setting": about, "summary": facts, "best": plan.best, "rows": rows, "plan": plan.to_dict()}
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def deployed(
    bench: Bench, best: dict[str, Any], lane: Lane, planned_rows: Sequence[Row], processes: Processes,
    prompts: Sequence[Sequence[int]],
) -> list[dict[str, Any]]:  # fmt: skip
    """The chosen configuration in a process that was made for its depth, beside plain decoding."""
    depth = best["num_speculative_tokens"]
    fresh = replace(lane, name="the choice", depths=(depth,))
    found = runs(bench, [fresh], prompts, start=processes.start)
    rows = [row for row in planned_rows if dict(row.config) == best]
    return [
        compared(row, gain(found, fresh.name, depth, row.temperature), lane.depths, f"{row.name}, started afresh")
        for row in rows
    ]


if __name__ == "__main__":
    typer.run(main)
