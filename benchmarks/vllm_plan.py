"""Error of `foretoken plan --engine vllm` on prompts that the plan has not seen.

    python benchmarks/vllm_plan.py --output vllm_plan.json
    python benchmarks/vllm_plan.py --prompts humaneval.jsonl --count 82

vLLM's CPU build (`make peers`). All prompts are completed at the draft lengths of a plan and at some between them, each
beside plain decoding. Then the prompts are split at random many times: the plan is made from one half and compared with
the measurements of the other, so that nothing depends on a single split. Two halves of a hundred prompts differ by five
percent. Finally a new vLLM process runs the configuration that the plan of the first half chose, as its user would
start it.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foretoken import zoo
from foretoken.bench.output import listing, report
from foretoken.cli.plan import lanes
from foretoken.cli.theme import staged
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.plan.candidates import PlanRow
from foretoken.plan.outcome import Plan
from foretoken.plan.vllm import (
    PLAIN,
    Answers,
    Bench,
    VllmCandidate,
    VllmRun,
    answers,
    chosen,
    vllm_plan,
)
from foretoken.train.widen.checkpoint import scaled
from options import Output, SomePrompts, some_prompts
from predictions import accuracy, accuracy_words, prediction

COLUMNS = {
    "vLLM": "{name}",
    "tokens": "{num_speculative_tokens}",
    "T": "{temperature:g}",
    "run": "{run_for_the_plan}",
    "predicted": "{predicted:.2f}",
    "measured": "{measured:.2f}",
    "bias": "{bias:+.1%}",
    "error": "{median_error:.1%}",
    "of tokens": "{median_tokens_error:.1%}",
    "within 10 %": "{within_10_percent:.0%}",
    "covered": "{coverage:.0%}",
}


def gain(runs_done: Sequence[VllmRun], lane: str, depth: int, temperature: float) -> tuple[float, float]:
    """Returns measured figures: the speedup of decoding over plain decoding beside it, and tokens per pass."""
    here = [run for run in runs_done if run.temperature == temperature and run.beside == lane]
    plain = next(run for run in here if run.lane == PLAIN)
    own = next(run for run in here if run.lane == lane and run.depth == depth)
    return own.tokens_per_pass * plain.step_seconds / own.step_seconds, own.tokens_per_pass


@dataclass
class Pair:
    """One configuration at one draft length: predicted and measured by split. run: whether the plan ran this length."""

    row: PlanRow
    run: bool
    speeds: list[dict[str, Any]] = field(default_factory=list)
    tokens_errors: list[float] = field(default_factory=list)

    def add(self, row: PlanRow, measured: tuple[float, float]) -> None:
        """Adds the prediction and the measurement of one split."""
        speedup, per_pass = measured
        self.speeds.append(prediction(row, speedup))
        self.tokens_errors.append(row.tokens_per_pass / per_pass - 1)

    @property
    def bias(self) -> float:
        """The median relative error of the predicted speedups."""
        return median(speed["error"] for speed in self.speeds)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.row.name,
            "config": dict(self.row.config),
            "temperature": self.row.temperature,
            "num_speculative_tokens": self.row.num_speculative_tokens,
            "run_for_the_plan": self.run,
            "predicted": median(speed["predicted"] for speed in self.speeds),
            "measured": median(speed["measured"] for speed in self.speeds),
            "bias": self.bias,
            "median_tokens_error": median(map(abs, self.tokens_errors)),
            **accuracy(self.speeds),
        }


def deepened(known: Sequence[VllmCandidate], depths: Sequence[int]) -> list[VllmCandidate]:
    """Returns the lanes with ``depths`` in addition, as far as the plan covers them."""
    return [
        replace(lane, depths=tuple(sorted({*lane.depths, *(d for d in depths if d <= max(lane.depths))})))
        for lane in known
    ]


def from_some(known: Sequence[VllmCandidate], measured: Sequence[Answers], places: Sequence[int]) -> Plan:
    """Returns the plan of these prompts, from the draft lengths that a plan runs."""
    ran = {lane.name: {0, *lane.depths} for lane in known}
    return vllm_plan(known, [each.run(places) for each in measured if each.depth in ran[each.beside]])


def halves(
    known: Sequence[VllmCandidate], measured: Sequence[Answers], count: int, splits: int, depths: Sequence[int]
) -> list[Pair]:
    """Returns predictions from each half beside the measurements of the other."""
    ran = {lane.name: lane.depths for lane in known}
    places = list(range(count))
    mixed = random.Random(0)
    pairs: dict[tuple[str, int, float], Pair] = {}
    for _ in range(splits):
        mixed.shuffle(places)
        seen, unseen = places[: count // 2], places[count // 2 :]
        plan = from_some(known, measured, seen)
        others = [each.run(unseen) for each in measured]
        for row in plan.rows:
            name, depth = row.name, row.num_speculative_tokens
            if depth in depths:
                pair = pairs.setdefault((name, depth, row.temperature), Pair(row, depth in ran[name]))
                pair.add(row, gain(others, name, depth, row.temperature))
    return list(pairs.values())


def summary(pairs: Sequence[Pair], fresh: Sequence[Pair]) -> tuple[list[Table | str], dict[str, float]]:
    """Returns the table and the line to print, and the summary."""
    speeds = [speed for pair in pairs for speed in pair.speeds]
    facts = {
        "pairs": float(len(pairs)),
        **accuracy(speeds),
        "largest_bias": max((pair.bias for pair in pairs), key=abs),
    }
    said = (
        f"{len(pairs)} pairs, {len(speeds)} predictions: {accuracy_words(facts)}; largest bias of a pair "
        f"{facts['largest_bias']:+.1%}"
    )
    return [listing(COLUMNS, [pair.to_dict() for pair in [*pairs, *fresh]]), said], facts


def main(
    prompts: SomePrompts = None,
    scaled_up: Annotated[bool, typer.Option("--scaled", help="The bundled target widened to 0.7 B.")] = False,
    heads: Annotated[list[str], typer.Option(help="Bundled heads besides: eagle3, medusa.")] = [],
    count: Annotated[int, typer.Option(min=4, help="Prompts; a plan has half of them.")] = 200,
    splits: Annotated[int, typer.Option(min=1, help="How often they are halved.")] = 200,
    max_tokens: Annotated[int, typer.Option(min=8)] = 48,
    temperature: Annotated[list[float], typer.Option(min=0.0)] = [0.0],
    depth: Annotated[list[int], typer.Option(min=1, help="To be compared.")] = [3, 5, 8],
    python: Annotated[Path | None, typer.Option(help="Of vLLM's environment.")] = None,
    engine_args: Annotated[str, typer.Option(metavar="JSON", help="Arguments of vllm.LLM.")] = '{"dtype": "bfloat16"}',
    output: Output = None,
) -> None:
    """Plans on some prompts, measures on others, and compares."""
    target = scaled("0.7b") if scaled_up else zoo.path("target")
    tokenizer = load_tokenizer(target)
    ids = [list(tokenizer(text)["input_ids"]) for text in some_prompts(prompts, count)]
    known = lanes(target, [str(zoo.path("draft"))], [str(zoo.path(role)) for role in heads], [])
    bench = Bench(
        target=str(target),
        temperatures=temperature,
        max_tokens=max_tokens,
        python=python,
        engine=json.loads(engine_args),
    )
    bench.command()
    with staged(Console(stderr=True)) as say:
        started = perf_counter()
        measured = answers(bench, deepened(known, depth), ids, say)
        seconds = perf_counter() - started
        pairs = halves(known, measured, len(ids), splits, depth)
        plan = from_some(known, measured, range(len(ids) // 2))
        fresh = []
        if plan.best is not None:
            say("the plan's choice, a fresh vLLM", 0.0)
            fresh = deployed(bench, plan.best, chosen(plan, known), plan.rows, ids[len(ids) // 2 :])
    parts, result = summary(pairs, fresh)
    facts = {"target": target.name, "seconds": round(seconds, 1), "count": len(ids)}
    report(
        parts,
        facts | {"splits": splits, "max_tokens": max_tokens},
        output,
        summary=result,
        best=plan.best,
        pairs=[pair.to_dict() for pair in [*pairs, *fresh]],
        plan=plan.to_dict(),
    )


def deployed(
    bench: Bench, best: dict[str, Any], lane: VllmCandidate, rows: Sequence[PlanRow], prompts: Sequence[Sequence[int]]
) -> list[Pair]:
    """Runs the chosen configuration in a process created for its draft length, beside plain decoding."""
    depth = best["num_speculative_tokens"]
    fresh = replace(lane, name=f"{lane.name}, restarted", depths=(depth,))
    done = [each.run() for each in answers(bench, [fresh], prompts)]
    pairs = []
    for row in rows:
        if dict(row.config) == best:
            pairs.append(Pair(replace(row, name=fresh.name), depth in lane.depths))
            pairs[-1].add(row, gain(done, fresh.name, depth, row.temperature))
    return pairs


if __name__ == "__main__":
    typer.run(main)
