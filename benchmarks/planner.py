"""Compares predictions of ``foretoken plan`` with measurements on prompts that it has not seen.

    python benchmarks/planner.py --output planner.json
    python benchmarks/planner.py --small --prompts humaneval.jsonl --count 8 --depth 2 --depth 6 --batch 1

The planner gets --count prompts, the measurement --unseen others. A measured speedup is tokens per second of decoding
over those of plain decoding at the same time. All configurations alternate, a few tokens each, between the steps of the
plan, so that drift of the machine's speed affects all equally. Steps that hold a prompt are skipped. Finished requests
are replaced by waiting ones, so that batches stay full. Errors are relative to the measured speedup. Default: the
bundled target widened to 0.7b with its heads.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, cycle
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from foretoken import zoo
from foretoken.bench.output import cores, listing, report
from foretoken.cli.theme import staged
from foretoken.control.fixed import Fixed
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import eos_ids, load_tokenizer
from foretoken.models.heads.files import find_head
from foretoken.models.loading import load_model
from foretoken.plan.candidates import Candidate, PlanRow, candidates
from foretoken.plan.outcome import Plan
from foretoken.plan.planner import Planner, PlanSettings
from foretoken.plan.texts import contexts
from foretoken.propose.base import Proposer
from foretoken.speculation import Builder, SpeculativeConfig
from options import Draft, Output, Small, SomePrompts, some_prompts, target_path
from predictions import COLUMNS, accuracy, accuracy_words, prediction
from systems import Totals, timed_step

ROLES = ("eagle3", "medusa")
STRETCH = 24  # consecutive tokens of a sequence: few enough for drift of the machine, many enough for its caches
PROMPTS = 6 << 30  # bytes of the prefix cache; prefill is not measured
Key = tuple[str, int]  # a candidate's name and its depth
PLAIN: Key = ("", 0)
TOGETHER = 4  # configurations between two stretches of plain decoding
Place = tuple[float, int]  # temperature and batch


def step_seconds(totals: Totals, batch: int) -> float:
    return totals.seconds * batch / totals.passes if totals.passes else float("nan")


@dataclass(frozen=True)
class Ground:
    """The models and prompts of all measurements. The target has a prefix cache, so each prompt is prefilled once."""

    target: Model
    builder: Builder
    settings: PlanSettings
    eos: Sequence[int]
    prompts: list[list[int]]
    _made: dict[str, Proposer] = field(default_factory=dict)
    _fills: Iterator[int] = field(default_factory=count)

    def engine(self, candidate: Candidate, depth: int, batch: int) -> Engine:
        """Returns an engine for a candidate. Engines whose proposers do not learn share one."""
        proposer = self._made.get(candidate.name)
        if proposer is None:
            proposer = self.builder.build(SpeculativeConfig.of(candidate.config))
            proposer.enable_prefix_cache(PROMPTS)
            if not proposer.learns:
                self._made[candidate.name] = proposer
        return self.decoding(proposer, depth, batch)

    def fill(self, engine: Engine, temperature: float, repeats: int) -> None:
        """Queues all prompts ``repeats`` times, to be completed in batches of the engine's size."""
        for seed in range(1000, 1000 + repeats):
            first = next(self._fills) * len(self.prompts)
            for context in contexts(self.prompts, self.settings.law(temperature), seed, first):
                engine.add(context, Length(self.settings.max_tokens, self.eos))

    def decoding(self, proposer: Proposer, depth: int, batch: int) -> Engine:
        return Engine(self.target, proposer, Fixed(depth), max_sequences=batch)


def stretch(engine: Engine) -> Totals:
    """Decodes the next tokens of one engine.

    Every engine decodes the same number of tokens, so that all decode the same texts over the same time: a period of
    slow memory affects plain steps and not compute-bound ones.
    """
    total, written = Totals(), 0
    while engine.busy and written < STRETCH * engine.max_sequences:
        steps, totals = timed_step(engine)
        written += totals.tokens
        if len(steps) == engine.max_sequences and all(step.position > 0 for step in steps):
            total += totals
    return total


class Few:
    """A few engines at one temperature and batch, on all prompts, alternating with plain decoding."""

    def __init__(self, ground: Ground, few: Sequence[tuple[Candidate, int]], place: Place, repeats: int) -> None:
        self.place, self._ground, self._repeats = place, ground, repeats
        self._plain = ground.decoding(Proposer(), 0, place[1])
        self._engines = {(c.name, depth): ground.engine(c, depth, place[1]) for c, depth in few}
        self.totals = {key: (Totals(), Totals()) for key in self._engines}
        for engine in self._engines.values():
            self._fill(engine)

    def turn(self) -> None:
        """Runs a stretch of every engine with work; the last one to finish also ends plain decoding."""
        if not self._plain.busy:
            self._fill(self._plain)
        busy = [(key, engine) for key, engine in self._engines.items() if engine.busy]
        middle = len(busy) // 2
        done = {key: stretch(each) for key, each in (*busy[:middle], (PLAIN, self._plain), *busy[middle:])}
        for key, _ in busy:
            own, plain = self.totals[key]
            self.totals[key] = own + done[key], plain + done[PLAIN]
        if not self.busy:
            self._plain.clear()

    def _fill(self, engine: Engine) -> None:
        self._ground.fill(engine, self.place[0], self._repeats)

    @property
    def waiting(self) -> int:
        """Returns the number of prompts that have not started, over all engines."""
        return sum(len(engine.waiting) for engine in self._engines.values())

    @property
    def busy(self) -> bool:
        """Whether any engine has work."""
        return any(engine.busy for engine in self._engines.values())


class Measurement:
    """All temperatures and batches, measured a few engines at a time. seconds: spent so far."""

    def __init__(self, ground: Ground, chosen: Sequence[Candidate], places: Sequence[Place], repeats: int) -> None:
        keys = [(candidate, depth) for candidate in chosen for depth in candidate.depths]
        some = [keys[at : at + TOGETHER] for at in range(0, len(keys), TOGETHER)]
        self._all = [Few(ground, few, place, repeats) for place in places for few in some]
        self._line = cycle(self._all)
        self._prompts = self._waiting
        self.seconds = 0.0

    def until(self, share: float) -> None:
        """Measures until this share of all prompts has started; with more than 1, to the end."""
        started = perf_counter()
        while any(few.busy for few in self._all) and self.share < share:
            next(self._line).turn()
        self.seconds += perf_counter() - started

    @property
    def share(self) -> float:
        return 1.0 - self._waiting / self._prompts

    @property
    def _waiting(self) -> int:
        return sum(few.waiting for few in self._all)

    def totals(self, place: Place, key: Key) -> tuple[Totals, Totals]:
        """Returns the totals of a candidate at a draft length, and those of plain decoding beside it."""
        return next(few.totals[key] for few in self._all if few.place == place and key in few.totals)


def compared(row: PlanRow, own: Totals, plain: Totals) -> dict[str, Any]:
    """Returns one entry of the result: prediction and measurement of a row. Seconds are of a step."""
    return {
        "name": row.name,
        "method": row.method,
        "num_speculative_tokens": row.num_speculative_tokens,
        "temperature": row.temperature,
        "batch": row.batch,
        **prediction(row, own.speed / plain.speed),
        "tokens_per_pass": row.tokens_per_pass,
        "measured_tokens_per_pass": own.tokens_per_pass,
        "seconds": row.step_seconds,
        "measured_seconds": step_seconds(own, row.batch),
        "plain_seconds": row.plain_seconds,
        "measured_plain_seconds": step_seconds(plain, row.batch),
        "estimator": row.estimator,
    }


def chosen_against_best(plan: Plan, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the measured speedups of the plan's choice and of the best configuration, by temperature and batch."""
    result = []
    for choice in plan.choices:
        place, row = (choice.temperature, choice.batch), choice.row
        measured = {
            (r["name"], r["num_speculative_tokens"]): r["measured"]
            for r in rows
            if (r["temperature"], r["batch"]) == place
        }
        best = max([1.0, *measured.values()])
        taken = 1.0 if row is None else measured[row.name, row.num_speculative_tokens]
        record: dict[str, Any] = {"temperature": place[0], "batch": place[1], "choice": row.name if row else "plain"}
        record |= {"tokens": row and row.config, "measured": taken, "best": best, "share": taken / best}
        result.append(record)
    return result


def summary(
    rows: Sequence[dict[str, Any]], choices: Sequence[dict[str, Any]]
) -> tuple[list[Table | str], dict[str, float]]:
    """Returns the table and lines to print, and the summary."""
    heads = {"proposer": "{name}", "tokens": "{num_speculative_tokens}", "T": "{temperature:g}", "batch": "{batch}"}
    measured = {"tokens/pass": "{tokens_per_pass:.2f}", "measured tokens/pass": "{measured_tokens_per_pass:.2f}"}
    parts: list[Table | str] = [listing(heads | COLUMNS | measured, rows)]
    parts += [
        f"temperature {c['temperature']:g}, batch {c['batch']}: the plan takes {c['choice']}, measured "
        f"{c['measured']:.2f}x; the best of the grid {c['best']:.2f}x ({c['share']:.1%} of it)"
        for c in choices
    ]
    facts = {
        "pairs": float(len(rows)),
        **accuracy(rows),
        "worst_choice": min(c["share"] for c in choices),
    }
    parts.append(
        f"{len(rows)} pairs: {accuracy_words(facts)}; "
        f"the plan's choice at worst {facts['worst_choice']:.1%} of the best"
    )
    return parts, facts


def grid(path: Path, draft: Path, given: Sequence[str], depths: Sequence[int], nodes: Sequence[int]) -> list[Candidate]:
    """Returns the default candidates, or the given ones, at the requested draft lengths and tree sizes."""
    if given:
        known = candidates([], [], [json.loads(text) for text in given])[3:]
    else:
        known = candidates([draft], [find_head(role, None, path) for role in ROLES])
    wanted = []
    for c in known:
        small = max(c.depths) <= 8
        own = tuple(depths) if small else tuple(nodes)
        wanted.append(Candidate(c.name, c.config, c.depths if len(c.depths) == 1 else own))
    return wanted


def main(
    prompts: SomePrompts = None,
    small: Small = False,
    draft: Draft = None,
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
    repeats: Annotated[int, typer.Option(min=1, help="Of every unseen prompt.")] = 1,
    turns: Annotated[int, typer.Option(min=3, help="Timed steps of every candidate, in the plan.")] = 24,
    output: Output = None,
) -> None:
    """Plans on some prompts, measures on others, and compares."""
    torch.set_num_threads(cores())
    path = target_path(None, small)
    tokenizer = load_tokenizer(path)

    @cache
    def load(other: str | Path) -> Model:
        return load_model(Path(other), max_length=4096)

    target, kept = load(path), load_model(path, max_length=4096)  # the plan also times prefill
    kept.enable_prefix_cache(PROMPTS)
    eos = eos_ids(path, tokenizer, target.vocab_size)
    ids = [list(tokenizer(text)["input_ids"]) for text in some_prompts(prompts, count + unseen)]
    settings = PlanSettings(temperatures=temperature, batches=batch, max_tokens=max_tokens, turns=turns)
    chosen = grid(path, draft or zoo.path("draft"), config, depth, nodes)
    places = [(t, b) for t in temperature for b in batch]
    with staged(Console(stderr=True)) as say:
        ground = Ground(kept, Builder(kept, tokenizer, path, load), settings, eos, ids[count:])
        measurement = Measurement(ground, chosen, places, repeats)

        def between(what: str, share: float) -> None:
            say(what, share)
            measurement.until(share)

        started = perf_counter()
        builder = Builder(target, tokenizer, path, load)
        plan = Planner(target, builder.build, settings, eos, between).plan(ids[:count], chosen)
        seconds = perf_counter() - started - measurement.seconds
        say("measuring what is left", 1.0)
        measurement.until(math.inf)
    rows = [
        compared(r, *measurement.totals((r.temperature, r.batch), (r.name, r.num_speculative_tokens)))
        for r in plan.rows
    ]
    choices = chosen_against_best(plan, rows)
    parts, result = summary(rows, choices)
    facts = {"target": path.name, "planned_in_seconds": round(seconds, 1), "count": count, "unseen": unseen}
    report(parts, facts, output, summary=result, choices=choices, rows=rows, plan=plan.to_dict())


if __name__ == "__main__":
    typer.run(main)
