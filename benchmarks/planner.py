"""Predicted against measured: what ``foretoken plan`` says, and what runs on prompts that it did not see then give.

    python benchmarks/planner.py --prompts humaneval.jsonl --json planner.json
    python benchmarks/planner.py --small --prompts humaneval.jsonl --count 8 --depth 2 --depth 6 --batch 1

The planner gets --count prompts of the shuffled file, the measurement --unseen others. A measured gain is tokens over
seconds of decoding, over plain decoding's in the same repeat; rounds that hold a prompt are left out on both sides, and
finished requests make room for waiting ones, so that batches stay full. Every repeat begins with another system.
Errors are of the predicted gain over the measured one. Default: the bundled target widened to 0.7b with its heads.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from foretoken import zoo
from foretoken.bench.setting import cores, setting, wide_console
from foretoken.bench.workloads import load_prompts
from foretoken.control.fixed import Fixed
from foretoken.engine.loop import Engine
from foretoken.llm import eos_ids
from foretoken.models.base import Model
from foretoken.models.checkpoint import load_model, load_tokenizer
from foretoken.models.heads.files import find_head
from foretoken.plan.candidates import Candidate, candidates
from foretoken.plan.outcome import Plan, Row
from foretoken.plan.planner import Planner, Settings
from foretoken.plan.texts import Ending, contexts
from foretoken.propose.base import Proposer
from foretoken.speculation import Builder, SpeculativeConfig
from foretoken.train.scale_up import scaled

ROLES = ("eagle3", "medusa")
WITHIN = 0.1
PLAIN = ("plain", 0)
Key = tuple[str, int]  # a candidate's name and its depth


@dataclass(frozen=True)
class Speed:
    """Rounds without a prompt. tokens_per_pass: of one sequence."""

    tokens_per_second: float
    tokens_per_pass: float


@dataclass(frozen=True)
class Ground:
    """What everything is measured on."""

    target: Model
    builder: Builder
    settings: Settings
    eos: Sequence[int]
    prompts: list[list[int]]

    def run(self, proposer: Proposer, depth: int, temperature: float, batch: int, seed: int) -> Speed:
        """All prompts, ``batch`` at once."""
        engine = Engine(self.target, proposer, Fixed(depth), max_sequences=batch)
        for context in contexts(self.prompts, self.settings.law(temperature), seed):
            engine.add(context, Ending(self.settings.max_tokens, self.eos))
        tokens = rounds = 0
        seconds = 0.0
        while engine.busy:
            started = perf_counter()
            steps = engine.step()
            took = perf_counter() - started
            if len(steps) == batch and all(step.position > 0 for step in steps):
                seconds += took
                tokens += sum(len(step.tokens) for step in steps)
                rounds += len(steps)
        return Speed(tokens / seconds if seconds else float("nan"), tokens / rounds if rounds else float("nan"))


def measure(
    ground: Ground, chosen: Sequence[Candidate], place: tuple[float, int], repeats: int, progress: Progress
) -> dict[Key, tuple[float, float]]:
    """Of every candidate and depth: gain over plain decoding, and tokens per pass."""
    temperature, batch = place
    configs = {(c.name, d): c.config for c in chosen for d in c.depths}
    keys: list[Key] = [PLAIN, *configs]
    found: dict[Key, list[Speed]] = {key: [] for key in keys}
    bar = progress.add_task(f"temperature {temperature:g}, batch {batch}", total=len(keys) * repeats)
    for repeat in range(repeats):
        for i in range(len(keys)):
            key = keys[(i + repeat * len(keys) // repeats) % len(keys)]
            config = configs.get(key, {"method": "none"})
            proposer = ground.builder.build(SpeculativeConfig.of(config))
            found[key].append(ground.run(proposer, key[1], temperature, batch, seed=1000 + repeat))
            progress.advance(bar)
    progress.remove_task(bar)
    plain = [speed.tokens_per_second for speed in found[PLAIN]]
    return {
        key: (
            median(s.tokens_per_second / base for s, base in zip(found[key], plain, strict=True)),
            median(s.tokens_per_pass for s in found[key]),
        )
        for key in configs
    }


def compared(row: Row, measured: tuple[float, float]) -> dict[str, Any]:
    """One line of the record."""
    gain, per_pass = measured
    return {
        "name": row.name, "method": row.method, "num_speculative_tokens": row.num_speculative_tokens,
        "temperature": row.temperature, "batch": row.batch, "predicted": row.speedup, "low": row.low, "high": row.high,
        "measured": gain, "tokens_per_pass": row.tokens_per_pass, "measured_tokens_per_pass": per_pass,
        "estimator": row.estimator, "error": row.speedup / gain - 1, "covered": row.low <= gain <= row.high,
    }  # fmt: skip


def chosen_against_best(plan: Plan, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At every temperature and batch: the measured gain of what the plan chose, over that of the best of the grid."""
    found = []
    for choice in plan.choices:
        mine = [r for r in rows if (r["temperature"], r["batch"]) == (choice.temperature, choice.batch)]
        best = max((r["measured"] for r in mine), default=1.0)
        taken = 1.0
        if choice.row is not None:
            key = (choice.row.name, choice.row.num_speculative_tokens)
            taken = next(r["measured"] for r in mine if (r["name"], r["num_speculative_tokens"]) == key)
        found.append({
            "temperature": choice.temperature, "batch": choice.batch,
            "choice": choice.row.name if choice.row else "plain", "tokens": choice.row and choice.row.config,
            "measured": taken, "best": max(best, 1.0), "share": taken / max(best, 1.0),
        })  # fmt: skip
    return found


def report(rows: Sequence[dict[str, Any]], choices: Sequence[dict[str, Any]], console: Console) -> dict[str, float]:
    """Tables and the summary. -> the summary"""
    table = Table(box=box.MARKDOWN)
    table.add_column("proposer")
    for head in ("tokens", "T", "batch", "predicted", "interval", "measured", "error", "tokens/pass", "measured "):
        table.add_column(head, justify="right")
    for r in rows:
        table.add_row(
            r["name"], str(r["num_speculative_tokens"]), f"{r['temperature']:g}", str(r["batch"]),
            f"{r['predicted']:.2f}", f"{r['low']:.2f}-{r['high']:.2f}{'' if r['covered'] else ' !'}",
            f"{r['measured']:.2f}", f"{r['error']:+.1%}", f"{r['tokens_per_pass']:.2f}",
            f"{r['measured_tokens_per_pass']:.2f}",
        )  # fmt: skip
    console.print(table)
    for c in choices:
        console.print(
            f"temperature {c['temperature']:g}, batch {c['batch']}: the plan takes {c['choice']}, measured "
            f"{c['measured']:.2f}x; the best of the grid {c['best']:.2f}x ({c['share']:.1%} of it)", highlight=False,
        )  # fmt: skip
    errors = [abs(r["error"]) for r in rows]
    facts = {
        "pairs": float(len(rows)),
        "median_error": median(errors),
        "within_10_percent": sum(error <= WITHIN for error in errors) / len(errors),
        "coverage": sum(r["covered"] for r in rows) / len(rows),
        "worst_choice": min(c["share"] for c in choices),
    }
    console.print(
        f"{len(rows)} pairs: median error {facts['median_error']:.1%}, within 10 % {facts['within_10_percent']:.1%}, "
        f"intervals cover {facts['coverage']:.1%}; the plan's choice at worst {facts['worst_choice']:.1%} of the best",
        style="bold", highlight=False,
    )  # fmt: skip
    return facts


def grid(path: Path, draft: Path, given: Sequence[str], depths: Sequence[int], nodes: Sequence[int]) -> list[Candidate]:
    """The default candidates, or those given, at the depths and tree sizes asked for."""
    if given:
        found = candidates([], [], [json.loads(text) for text in given])[3:]
    else:
        found = candidates([draft], [find_head(role, None, path) for role in ROLES])
    wanted = []
    for c in found:
        small = max(c.depths) <= 8
        own = tuple(depths) if small else tuple(nodes)
        wanted.append(Candidate(c.name, c.config, c.depths if len(c.depths) == 1 else own))
    return wanted


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines with a prompt each.")],
    small: Annotated[bool, typer.Option("--small", help="The bundled target as it is.")] = False,
    draft: Annotated[Path | None, typer.Option(help="Default: the bundled one.")] = None,
    config: Annotated[
        list[str], typer.Option(help="Speculative configurations as JSON instead of the default ones.")
    ] = [],
    count: Annotated[int, typer.Option(min=2, help="Prompts for the planner.")] = 16,
    unseen: Annotated[int, typer.Option(min=1, help="Prompts for the measurement.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=8)] = 64,
    temperature: Annotated[list[float], typer.Option(min=0.0)] = [0.0, 0.7, 1.0],
    batch: Annotated[list[int], typer.Option(min=1)] = [1, 4],
    depth: Annotated[list[int], typer.Option(min=1, help="Of chains.")] = [1, 2, 3, 4, 5, 6, 7, 8],
    nodes: Annotated[list[int], typer.Option(min=1, help="Of trees.")] = [8, 14],
    repeats: Annotated[int, typer.Option(min=1)] = 1,
    turns: Annotated[int, typer.Option(min=3, help="Timed rounds of every candidate, in the plan.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write setting, rows and summary here.")] = None,
) -> None:
    """Plan on some prompts, measure on others, compare."""
    torch.set_num_threads(cores())
    path = zoo.path("target") if small else scaled("0.7b")
    tokenizer = load_tokenizer(path)

    @cache
    def load(other: str | Path) -> Model:
        return load_model(Path(other), max_length=4096)

    target = load(path)
    builder = Builder(target, tokenizer, path, load)
    eos = eos_ids(path, tokenizer)
    texts = load_prompts(prompts)
    random.Random(0).shuffle(texts)  # a file's first prompts may be of another kind than its next
    ids = [list(tokenizer(text)["input_ids"]) for text in texts[: count + unseen]]
    settings = Settings(temperatures=temperature, batches=batch, max_tokens=max_tokens, turns=turns)
    chosen = grid(path, draft or zoo.path("draft"), config, depth, nodes)
    console = wide_console()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=1.0)
        planner = Planner(target, builder.build, settings, eos,
                          lambda what, share: progress.update(bar, description=what, completed=share))  # fmt: skip
        started = perf_counter()
        plan = planner.plan(ids[:count], chosen)
        seconds = perf_counter() - started
        progress.remove_task(bar)
        ground = Ground(target, builder, settings, eos, ids[count:])
        places = [(t, b) for t in temperature for b in batch]
        found = {place: measure(ground, chosen, place, repeats, progress) for place in places}
    rows = [compared(r, found[r.temperature, r.batch][r.name, r.num_speculative_tokens]) for r in plan.rows]
    choices = chosen_against_best(plan, rows)
    facts = report(rows, choices, console)
    about = setting() | {"target": path.name, "planned_in_seconds": round(seconds, 1), "count": count, "unseen": unseen}
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), style="dim")
    if json_file is not None:
        record = {"setting": about, "summary": facts, "choices": choices, "rows": rows, "plan": plan.to_dict()}
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
