"""A mixed stream of requests, one proposer: drafting as much as pays beside every fixed depth.

    python benchmarks/adaptive.py --json adaptive.json

Four parts, their requests in turn, one at a time: completion, editing and repetition as in ``mixture.py`` (greedy, the
last two dictated), and completion at a high temperature. Every request goes through all systems, each time in another
order; figures are tokens over seconds, summed. What the controller knows it has learned in the stream, apart from the
rehearsal that every ``LLM`` begins with.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.progress import track
from rich.table import Table

from foretoken import zoo
from foretoken.bench.setting import cores, setting, wide_console
from foretoken.bench.workloads import FUNCTIONS, load_prompts
from foretoken.control.fixed import Fixed
from foretoken.control.tempo import Tempo
from foretoken.core.context import Context
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.rehearsal import rehearse
from foretoken.models.checkpoint import load_model, load_tokenizer
from foretoken.speculation import Builder, SpeculativeConfig
from foretoken.train.scale_up import scaled
from mixture import Cell, Dictation, Length, Task, tasks

PARTS = ("completion", "editing", "repetition", "hot")
ADAPTIVE = "adaptive"


@dataclass(frozen=True)
class Request:
    """A task and its temperature."""

    part: str
    task: Task
    temperature: float


def stream(each: Sequence[Task], hot: float) -> list[Request]:
    """Every completion comes a second time, hot."""
    requests: list[Request] = []
    for task in each:
        requests.append(Request(task.part, task, 0.0))
        if task.part == "completion":
            requests.append(Request("hot", task, hot))
    return requests


def run(engine: Engine, request: Request, identifier: int) -> tuple[list[int], int, float]:
    """-> tokens, passes, seconds"""
    target, task = engine.target, request.task
    assert isinstance(target, Dictation)
    target.wanted, target.after = task.output, len(task.prompt)
    law, prompt = SamplingLaw(temperature=request.temperature), list(task.prompt)
    context = Context(identifier, prompt, len(prompt), law, Streams(identifier), prediction=task.prediction)
    engine.add(context, Length(task.tokens))  # type: ignore[arg-type]
    passes, started = 0, time.perf_counter()
    while engine.busy:
        engine.step()
        passes += 1
    seconds = time.perf_counter() - started
    engine.take(identifier)
    return context.tokens[context.prompt_length :], passes, seconds


def compare(engines: Mapping[str, Engine], requests: Sequence[Request], repeats: int) -> list[Cell]:
    """Every request through every engine. Raises RuntimeError where two greedy texts differ."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    names = list(engines)
    turns = [i for _ in range(repeats) for i in range(len(requests))]
    for at, i in enumerate(track(turns, description="requests", transient=True)):
        texts = []
        for name in names[at % len(names) :] + names[: at % len(names)]:
            text, passes, seconds = run(engines[name], requests[i], at)
            texts.append(text)
            for part in (requests[i].part, "stream"):
                sums[name, part] = [a + b for a, b in zip(sums[name, part], (len(text), passes, seconds), strict=True)]
        if requests[i].temperature == 0.0 and any(text != texts[0] for text in texts):
            raise RuntimeError(f"two systems wrote different texts in request {i} ({requests[i].part}): not exact")
    return [Cell(name, part, int(n), int(p), s) for (name, part), (n, p, s) in sums.items()]


def table(cells: Sequence[Cell], names: Sequence[str]) -> Table:
    """Against plain decoding, and in brackets tokens a pass; the best fixed depth of a column has a star."""
    found = {(c.system, c.part): c for c in cells}
    result = Table(box=box.MARKDOWN)
    result.add_column("system")
    columns = (*PARTS, "stream")
    for column in columns:
        result.add_column(column, justify="right")
    fixed = [name for name in names if name != ADAPTIVE]
    best = {part: max(fixed, key=lambda name, part=part: found[name, part].speed) for part in columns}
    for name in names:
        line = []
        for part in columns:
            cell, plain = found[name, part], found["depth 0", part]
            star = "*" if best[part] == name else ""
            line.append(f"{cell.speed / plain.speed:.2f}x{star} ({cell.tokens / cell.passes:.2f})")
        result.add_row(name, *line)
    single = best["stream"]
    line = [f"{found[ADAPTIVE, part].speed / found[single, part].speed:.3f}" for part in columns]
    result.add_row(f"adaptive / {single}", *line)
    return result


def main(
    target: Annotated[Path | None, typer.Option(help="Default: the bundled one, widened to 0.7 B.")] = None,
    small: Annotated[bool, typer.Option("--small", help="The bundled target itself.")] = False,
    speculative_config: Annotated[str | None, typer.Option(help="JSON; default: the bundled draft model.")] = None,
    depth: Annotated[list[int], typer.Option(help="A fixed depth; may be repeated.")] = [1, 2, 3, 4, 6, 8, 12, 16],
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with a prompt each, for completion.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Requests of each part.")] = 6,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 128,
    hot: Annotated[float, typer.Option(min=0.0, help="The high temperature.")] = 1.5,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write setting and cells here.")] = None,
) -> None:  # fmt: skip
    """Tokens per second of the adaptive controller and of each fixed depth, on each part and on the whole stream."""
    torch.set_num_threads(cores())
    path = target or (zoo.path("target") if small else scaled())
    tokenizer = load_tokenizer(path)
    model = Dictation(load_model(path, max_length=4096))
    builder = Builder(model, tokenizer, path, lambda other: load_model(Path(other), max_length=4096))
    given = json.loads(speculative_config) if speculative_config else {"method": "draft_model"}
    if given["method"] == "draft_model":
        given.setdefault("model", str(zoo.path("draft")))
    config = SpeculativeConfig.of(given)
    engines = {f"depth {k}": Engine(model, builder.build(config), Fixed(k)) for k in (0, *depth)}
    proposer, tempo = builder.build(config), Tempo()
    rehearse(model, proposer, tempo, config.most)
    engines[ADAPTIVE] = Engine(model, proposer, config.controller(model.device, tempo))
    texts = load_prompts(prompts) if prompts else list(FUNCTIONS)
    requests = stream(list(tasks(tokenizer, texts, count, tokens)), hot)
    cells = compare(engines, requests, repeats)
    console = wide_console()
    console.print(table(cells, list(engines)))
    facts = setting() | {"target": path.name, "config": given, "count": count, "tokens": tokens, "repeats": repeats}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    if json_file is not None:
        rows = [asdict(cell) | {"tokens_per_second": cell.speed} for cell in cells]
        json_file.write_text(json.dumps({"setting": facts, "cells": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
