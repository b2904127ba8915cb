"""A mixed stream of greedy requests, one at a time: the mixture beside each of its members alone.

    python benchmarks/mixture.py --output mixture.json

Three parts, whose requests alternate. completion: functions to complete freely. editing: a function, then the same
function with a rename and a fix (``bench/editing.py``), with the original as the client's prediction. repetition: one
pattern repeated with other words in it. The bundled target completes code and does not follow instructions, so in the
last two parts the output is forced: in the target's rows its token is made the most probable. Passes cost the same, and
no proposer knows the output.

Every request goes through all systems, which take turns of a few steps, so that drift of the machine's speed affects
all of them alike. Figures are total tokens over total seconds of a part. Systems keep what they learn from request to
request, and start empty.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.progress import track
from rich.table import Table
from torch import Tensor

from foretoken import zoo
from foretoken.bench.editing import editing_tasks
from foretoken.bench.setting import cores, setting, wide_console
from foretoken.bench.workloads import FUNCTIONS, load_prompts
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Handle, Model, Scores
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.speculation import Builder, SpeculativeConfig
from foretoken.train.widen.checkpoint import scaled

PARTS = ("completion", "editing", "repetition")
_MAX_REQUESTS = 256  # requests of one task
_STRETCH = 8  # consecutive steps of one system
WORDS = (
    "north",
    "east",
    "south",
    "west",
    "red",
    "green",
    "blue",
    "black",
    "apple",
    "pear",
    "plum",
    "fig",
    "iron",
    "tin",
    "zinc",
    "lead",
)
PATTERNS = (
    "    assert parse('{0}: {1}') == ('{0}', '{1}')\n",
    "    {{'name': '{0}', 'colour': '{1}', 'size': {2}}},\n",
    "register('{0}', handler=on_{0}, fallback=on_{1}, timeout={2})\n",
    "INSERT INTO items (name, origin, amount) VALUES ('{0}', '{1}', {2});\n",
)


@dataclass(frozen=True)
class Task:
    """One request, in token ids.

    output: the text that is forced; None where the target generates freely at ``temperature``.
    beside: prompts that are completed in the same batch, each with as many tokens.
    """

    part: str
    prompt: list[int]
    tokens: int
    output: list[int] | None = None
    prediction: tuple[int, ...] = ()
    temperature: float = 0.0
    beside: tuple[list[int], ...] = ()


@dataclass(frozen=True)
class Cell:
    """Result of one system on one part. tokens_per_pass: emitted tokens over passes of the target."""

    system: str
    part: str
    tokens: int
    passes: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Dictation(Model):
    """A target whose output can be forced: at each position the wanted token is made the most probable.

    ``wanted`` is the output that follows a prompt of ``after`` tokens; None leaves every row as it is.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.wanted: Sequence[int] | None = None
        self.after = 0
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.num_layers, self.hidden_size = model.num_layers, model.hidden_size
        self.device, self.dtype, self.batch_invariant = model.device, model.dtype, model.batch_invariant

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        for handle in handles:
            handle.argmax_only = handle.argmax_only and self.wanted is None  # the logits are changed below
        scores = self._model.score(handles, drafts, taps)
        if self.wanted is not None:
            for handle, draft, score in zip(handles, drafts, scores, strict=True):
                self._dictate(len(handle.tokens) - self.after, draft, score.logits)
        return scores

    def _dictate(self, written: int, draft: Draft, logits: Tensor) -> None:
        assert self.wanted is not None and logits.shape[0] == len(draft) + 1
        for row, depth in enumerate((0, *draft.depths)):
            if written + depth < len(self.wanted):
                logits[row, self.wanted[written + depth]] = logits[row].max() + 1.0

    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        return self._model.open(prompt, source, cache_salt)

    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        self._model.commit(handles, tokens)

    def close(self, handle: Handle) -> None:
        self._model.close(handle)

    def unembed(self, hidden: Tensor) -> Tensor:
        return self._model.unembed(hidden)


def tasks(tokenizer: Any, prompts: Sequence[str], count: int, tokens: int) -> Iterator[Task]:
    """Yields ``count`` requests of each part, in alternation."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    completion = [Task("completion", ids(prompt), tokens) for prompt in prompts[:count]]
    editing = [
        Task("editing", task.prompt, len(task.output), task.output, tuple(task.reference))
        for task in editing_tasks(tokenizer)[:count]
    ]
    repetition = []
    for i in range(count):
        lines = [pattern_line(i, line) for line in range(18)]
        output = ids("".join(lines[2:]))
        repetition.append(Task("repetition", ids("".join(lines[:2])), len(output), output))
    for turn in zip_longest(completion, editing, repetition):
        yield from (task for task in turn if task is not None)


def pattern_line(task: int, line: int) -> str:
    """Returns one line of the repeated pattern."""
    at = task * 7 + line * 5
    return PATTERNS[task % len(PATTERNS)].format(WORDS[at % 16], WORDS[(at * 3 + line) % 16], at * 37 % 91)


@dataclass
class Run:
    """One task in one system."""

    engine: Engine
    contexts: list[Context]
    passes: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, engine: Engine, task: Task, identifier: int) -> Run:
        """Queues the task's requests in ``engine``."""
        law = SamplingLaw(temperature=task.temperature)
        contexts = [
            Context(number, [*prompt], len(prompt), law, Streams(number), prediction=task.prediction)
            for number, prompt in enumerate((task.prompt, *task.beside), identifier * _MAX_REQUESTS)
        ]
        for context in contexts:
            engine.add(context, Length(task.tokens))
        return cls(engine, contexts)

    def stretch(self, steps: int) -> bool:
        """Runs at most ``steps`` steps. Returns whether any sequence is unfinished."""
        started = time.perf_counter()
        for _ in range(steps):
            if self.engine.busy:
                self.engine.step()
                self.passes += 1
        self.seconds += time.perf_counter() - started
        return self.engine.busy

    def text(self) -> list[int]:
        """Returns the generated tokens of all requests, and removes the requests from the engine."""
        for context in self.contexts:
            self.engine.take(context.id)
        return [token for context in self.contexts for token in context.tokens[context.prompt_length :]]


def compare(engines: Mapping[str, Engine], stream: Sequence[Task], repeats: int) -> list[Cell]:
    """Runs every task in every engine. Raises RuntimeError where two greedy texts differ."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    turns = [(repeat, i) for repeat in range(repeats) for i in range(len(stream))]
    for at, (_, i) in enumerate(track(turns, description="requests", transient=True)):
        task = stream[i]
        for engine in engines.values():
            assert isinstance(engine.target, Dictation)
            engine.target.wanted, engine.target.after = task.output, len(task.prompt)
        runs = {name: Run.of(engine, task, at) for name, engine in engines.items()}
        going = list(runs)
        while going:
            going = [*going[1:], going[0]]  # rotates the order of the systems
            going = [name for name in going if runs[name].stretch(_STRETCH)]
        texts = []
        for name, run in runs.items():
            texts.append(run.text())
            for part in (task.part, "stream"):
                totals = len(texts[-1]), run.passes, run.seconds
                sums[name, part] = [a + b for a, b in zip(sums[name, part], totals, strict=True)]
        if task.temperature == 0.0 and any(text != texts[0] for text in texts):
            raise RuntimeError(f"two systems wrote different texts in request {i} ({task.part}): one is not exact")
    return [Cell(name, part, int(n), int(p), s) for (name, part), (n, p, s) in sums.items()]


def table(
    cells: Sequence[Cell],
    names: Sequence[str],
    ours: str = "mixture",
    plain: str = "none",
    parts: Sequence[str] = PARTS,
    single: bool = False,
) -> Table:
    """Returns tokens per second relative to ``plain``, and in brackets tokens per pass; the best system has a star.

    The last line is ``ours`` over the best system of each column or, if ``single``, over the best one of the stream.
    """
    by_part = {(c.system, c.part): c for c in cells}
    result = Table(box=box.MARKDOWN)
    result.add_column("system")
    columns = (*parts, "stream")
    for column in columns:
        result.add_column(column, justify="right")
    singles = [name for name in names if name != ours]
    best = {part: max((by_part[name, part].speed, name) for name in singles)[1] for part in columns}
    for name in names:
        line = []
        for part in columns:
            cell, base = by_part[name, part], by_part[plain, part]
            star = "*" if best[part] == name else ""
            line.append(f"{cell.speed / base.speed:.2f}x{star} ({cell.tokens / cell.passes:.2f})")
        result.add_row(name, *line)
    against = {part: best["stream" if single else part] for part in columns}
    ratios = (f"{by_part[ours, part].speed / by_part[against[part], part].speed:.3f}" for part in columns)
    result.add_row(f"{ours} / {best['stream'] if single else 'best'}", *ratios)
    return result


def main(
    target: Annotated[Path | None, typer.Option(help="Default: the bundled one, widened to 0.7 B.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Of the draft model; default: the bundled one.")] = None,
    member: Annotated[list[str], typer.Option(help="A member as JSON; may be repeated.")] = [
        '{"method": "suffix"}',
        '{"method": "prediction"}',
        '{"method": "recycling"}',
        '{"method": "ngram"}',
        '{"method": "draft_model", "num_speculative_tokens": 6}',
    ],
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with a prompt each, for completion.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Requests of each part.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 128,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    json_file: Annotated[Path | None, typer.Option("--output", help="Write setting and cells here.")] = None,
) -> None:
    """Prints tokens per second of the mixture and of each member alone, by part and in total."""
    torch.set_num_threads(cores())
    path = target or scaled()
    tokenizer = load_tokenizer(path)
    model = Dictation(load_model(path, max_length=4096))
    builder = Builder(model, tokenizer, path, lambda other: load_model(Path(other), max_length=4096))
    members = [json.loads(text) for text in member]
    for one in members:
        if one["method"] == "draft_model":
            one.setdefault("model", str(draft or zoo.path("draft")))
    configs = {"none": {"method": "none"}} | {one["method"]: one for one in members}
    configs["mixture"] = {"method": "mixture", "members": members}
    engines: dict[str, Engine] = {}
    for name, config in configs.items():
        own = {key: value for key, value in config.items() if key != "cost"}
        speculative = SpeculativeConfig.of(own)
        engines[name] = Engine(model, builder.build(speculative), Fixed(speculative.tokens))
    texts = load_prompts(prompts) if prompts else list(FUNCTIONS)
    stream = list(tasks(tokenizer, texts, count, tokens))
    cells = compare(engines, stream, repeats)
    console = wide_console()
    console.print(table(cells, list(engines)))
    facts = setting() | {"target": path.name, "count": count, "tokens": tokens, "repeats": repeats}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    if json_file is not None:
        rows = [asdict(cell) | {"tokens_per_second": cell.speed} for cell in cells]
        json_file.write_text(json.dumps({"setting": facts, "cells": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
