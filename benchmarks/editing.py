"""An edit of code that is in the prompt: tokens per second of each method beside plain decoding.

The sampling distribution forces the output (see ``foretoken.bench.editing``), so every system generates the same text.
The first step of each task, which is mostly prefill, is not timed; systems take turns. Proposers are rebuilt each turn,
so that none has the last turn's outputs in its store.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.progress import track
from rich.table import Table

from foretoken import LLM, zoo
from foretoken.bench.clock import TimedTask, interleaved
from foretoken.bench.editing import Dictated, EditingTask, editing_tasks
from foretoken.bench.setting import cores, setting, wide_console
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.step import StepOutput
from foretoken.core.streams import Streams
from foretoken.costs.measured import TimeSpread
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import resolve
from foretoken.models.loading import load_model
from foretoken.propose.base import Proposer
from foretoken.speculation import Builder, SpeculativeConfig

CONFIGS = [
    '{"method": "ngram", "num_speculative_tokens": 16}',
    '{"method": "suffix", "num_speculative_tokens": 24}',
    '{"method": "prediction", "num_speculative_tokens": 16}',
    '{"method": "prediction", "num_speculative_tokens": 32}',
]


@dataclass(frozen=True)
class Row:
    """Result of one method. ``tokens`` after the first steps, in ``seconds`` (median and spread of the turns)."""

    config: dict[str, Any]
    seconds: TimeSpread
    tokens: int
    steps: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Returns tokens per second."""
        return self.tokens / self.seconds.median


def write(engine: Engine, task: EditingTask) -> tuple[float, list[StepOutput]]:
    """Generates one output. Returns the seconds and the steps after the first step."""
    context = Context(
        0, list(task.prompt), len(task.prompt), Dictated(task.output), Streams(0), prediction=tuple(task.reference)
    )
    engine.add(context, Length(len(task.output)))
    engine.step()
    steps: list[StepOutput] = []
    started = perf_counter()
    while engine.busy:
        steps += engine.step()
    seconds = perf_counter() - started
    engine.take(0)
    if context.tokens[context.prompt_length :] != list(task.output):
        raise RuntimeError("the text is not the one that was dictated")
    return seconds, steps


def measure(
    target: Model, builds: dict[str, Callable[[], tuple[Proposer, int]]], tasks: list[EditingTask], turns: int
) -> dict[str, Row]:
    """Times all methods on all tasks, interleaved."""
    steps: dict[str, list[StepOutput]] = {}

    def turn(name: str) -> float:
        proposer, depth = builds[name]()
        engine = Engine(target, proposer, Fixed(depth))
        results = [write(engine, task) for task in tasks]
        steps[name] = [step for _, some in results for step in some]
        return sum(seconds for seconds, _ in results)

    timed = interleaved(
        {name: TimedTask(partial(turn, name)) for name in builds}, turns, lambda order: track(order, "turns")
    )
    return {
        name: Row(
            json.loads(name),
            timed[name],
            sum(len(step.tokens) for step in steps[name]),
            len(steps[name]),
            sum(len(step.draft) for step in steps[name]),
            sum(step.accepted for step in steps[name]),
        )
        for name in builds
    }


def table(rows: list[Row]) -> Table:
    """Returns a table with a line for each method."""
    result = Table(box=box.MARKDOWN)
    for head in ("method", "tokens/s", "low-high", "plain = 1", "tokens per step", "drafted per step"):
        result.add_column(head, justify="left" if head == "method" else "right")
    for row in rows:
        spread = f"{row.tokens / row.seconds.high:.0f}-{row.tokens / row.seconds.low:.0f}"
        result.add_row(
            " ".join(f"{k}={v}" if k != "method" else str(v) for k, v in row.config.items()),
            f"{row.rate:.0f}",
            spread,
            f"{row.rate / rows[0].rate:.2f}",
            f"{row.tokens / row.steps:.2f}",
            f"{row.drafted / row.steps:.1f}",
        )
    return result


def main(
    target: Annotated[str | None, typer.Option(help="Folder or hub name. [bundled target]")] = None,
    config: Annotated[list[str], typer.Option(help="A speculative_config as JSON; may be repeated.")] = CONFIGS,
    turns: Annotated[int, typer.Option(min=1)] = 3,
    tasks: Annotated[int, typer.Option(min=1, max=8, help="How many of the edits.")] = 8,
    dtype: str = "auto",
    device: str = "auto",
    quantization: Annotated[str | None, typer.Option(help="int8, as for the target.")] = None,
    json_file: Annotated[Path | None, typer.Option("--output", help="Write setting and rows here.")] = None,
) -> None:
    """Races plain decoding and each configuration over the edits."""
    torch.set_num_threads(cores())
    path = resolve(target) if target is not None else zoo.path("target")
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    llm = LLM(path, speculative_config={"method": "none"}, quantization=quantization, **options)
    builder = Builder(llm.target, llm.tokenizer, path, lambda other: load_model(resolve(other), **options))

    def build(text: str) -> tuple[Proposer, int]:
        one = SpeculativeConfig.of(json.loads(text))
        return builder.build(one), one.tokens

    names = ['{"method": "none"}', *config]
    rows = measure(
        llm.target, {name: partial(build, name) for name in names}, editing_tasks(llm.tokenizer)[:tasks], turns
    )
    console = wide_console()
    console.print(table(list(rows.values())))
    facts = setting() | {"target": str(path), "turns": turns, "tasks": tasks}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    if json_file is not None:
        plain = next(iter(rows.values())).rate
        records = [asdict(row) | {"tokens_per_second": row.rate, "ratio": row.rate / plain} for row in rows.values()]
        json_file.write_text(json.dumps({"setting": facts, "rows": records}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
