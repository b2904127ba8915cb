"""Systems that decode the same requests in turns of a few steps, so that drift of the machine affects all equally.

A stream of requests has three parts, which alternate. completion: functions to complete freely. editing: a function,
then the same function with a rename and a fix, with the original as the client's prediction. repetition: one pattern
repeated with other words in it. The output of the last two is forced (``foretoken.bench.editing``).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.progress import track
from rich.table import Table

from foretoken import zoo
from foretoken.bench.editing import ForcedOutput, editing_tasks
from foretoken.bench.output import figures
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.speculation import Builder, SpeculativeConfig

PARTS = ("completion", "editing", "repetition")
_MAX_REQUESTS = 256  # requests of one task
_STRETCH = 8  # consecutive steps of one system
_WORDS = [
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
]
_PATTERNS = (
    "    assert parse('{0}: {1}') == ('{0}', '{1}')\n",
    "    {{'name': '{0}', 'colour': '{1}', 'size': {2}}},\n",
    "register('{0}', handler=on_{0}, fallback=on_{1}, timeout={2})\n",
    "INSERT INTO items (name, origin, amount) VALUES ('{0}', '{1}', {2});\n",
)


@dataclass(frozen=True)
class Totals:
    """Sums over steps. passes: of single sequences. drafted, accepted: draft tokens."""

    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, name) + getattr(other, name) for name in asdict(self)))

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else float("nan")

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per pass of a sequence."""
        return self.tokens / self.passes if self.passes else float("nan")


def timed_step(engine: Engine) -> tuple[list[StepOutput], Totals]:
    """Runs one step of an engine. Returns its outputs and totals."""
    started = perf_counter()
    steps = engine.step()
    seconds = perf_counter() - started
    tokens, drafted = sum(len(step.tokens) for step in steps), sum(len(step.draft) for step in steps)
    return steps, Totals(tokens, len(steps), seconds, drafted, sum(step.accepted for step in steps))


def builder_of(target: Path, **options: Any) -> Builder:
    """Returns a builder of proposers for a target. All models are loaded with ``options``."""
    return Builder(
        load_model(target, **options), load_tokenizer(target), target, lambda other: load_model(Path(other), **options)
    )


def forced_builder(target: Path, **options: Any) -> Builder:
    """Returns a builder of proposers for a target whose output can be forced."""
    builder = builder_of(target, max_length=4096, **options)
    return replace(builder, target=ForcedOutput(builder.target))


def proposer_configs(texts: Sequence[str], draft: Path | None = None) -> list[dict[str, Any]]:
    """Returns configurations given as JSON. Draft models without a name are ``draft``, or the bundled one."""
    configs: list[dict[str, Any]] = [json.loads(text) for text in texts]
    for config in configs:
        if config["method"] == "draft_model":
            config.setdefault("model", str(draft or zoo.path("draft")))
    return configs


def fixed_engine(builder: Builder, config: Mapping[str, Any], depth: int | None = None, **options: Any) -> Engine:
    """Returns an engine with a fixed draft length, that of the configuration unless ``depth`` is given."""
    speculative = SpeculativeConfig.of(config)
    fixed = Fixed(speculative.tokens if depth is None else depth)
    return Engine(builder.target, builder.build(speculative), fixed, **options)


@dataclass(frozen=True)
class Task:
    """One request, in token ids.

    output: the text that is forced; None if the target generates freely at ``temperature``.
    beside: prompts that are completed in the same batch, each with as many tokens.
    """

    part: str
    prompt: list[int]
    tokens: int
    output: list[int] | None = None
    prediction: tuple[int, ...] = ()
    temperature: float = 0.0
    beside: tuple[list[int], ...] = ()


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
    for number in range(count):
        lines = [_pattern_line(number, line) for line in range(18)]
        output = ids("".join(lines[2:]))
        repetition.append(Task("repetition", ids("".join(lines[:2])), len(output), output))
    for turn in zip_longest(completion, editing, repetition):
        yield from (task for task in turn if task is not None)


def _pattern_line(task: int, line: int) -> str:
    word = task * 7 + line * 5
    return _PATTERNS[task % len(_PATTERNS)].format(_WORDS[word % 16], _WORDS[(word * 3 + line) % 16], word * 37 % 91)


@dataclass
class TaskRun:
    """One task in one engine. decode_only: whether steps that hold a prompt do not count."""

    engine: Engine
    task: Task
    number: int
    decode_only: bool
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        law, task = SamplingLaw(temperature=self.task.temperature), self.task
        self.contexts = [
            Context(request, [*prompt], len(prompt), law, Streams(request), prediction=task.prediction)
            for request, prompt in enumerate((task.prompt, *task.beside), self.number * _MAX_REQUESTS)
        ]
        for context in self.contexts:
            self.engine.add(context, Length(task.tokens))

    def stretch(self, steps: int) -> bool:
        """Runs at most ``steps`` steps. Returns whether any sequence is unfinished."""
        for _ in range(steps):
            if self.engine.busy:
                outputs, totals = timed_step(self.engine)
                if not self.decode_only or all(output.position > 0 for output in outputs):
                    self.totals += totals
        return self.engine.busy

    def text(self) -> list[int]:
        """Returns the generated tokens of all requests, and removes the requests from the engine."""
        for context in self.contexts:
            self.engine.take(context.id)
        return [token for context in self.contexts for token in context.tokens[context.prompt_length :]]


@dataclass(frozen=True)
class Cell:
    """Result of one system on one part of the stream, or on all of it ("stream")."""

    system: str
    part: str
    totals: Totals

    def record(self) -> dict[str, Any]:
        """Returns the cell as JSON has it."""
        return {
            "system": self.system,
            "part": self.part,
            **asdict(self.totals),
            "tokens_per_second": self.totals.speed,
        }


def compare(
    engines: Mapping[str, Engine], stream: Sequence[Task], repeats: int, decode_only: bool = False
) -> list[Cell]:
    """Runs every task in every engine. Raises RuntimeError where two greedy texts differ."""
    sums: dict[tuple[str, str], Totals] = defaultdict(Totals)
    turns = [task for _ in range(repeats) for task in stream]
    for number, task in enumerate(track(turns, description="requests", transient=True)):
        for engine in engines.values():
            assert isinstance(engine.target, ForcedOutput)
            engine.target.output, engine.target.prompt_length = task.output, len(task.prompt)
        runs = {name: TaskRun(engine, task, number, decode_only) for name, engine in engines.items()}
        unfinished = list(runs)
        while unfinished:
            unfinished = [*unfinished[1:], unfinished[0]]  # rotates the order of the systems
            unfinished = [name for name in unfinished if runs[name].stretch(_STRETCH)]
        texts = [run.text() for run in runs.values()]
        for name, run in runs.items():
            for part in (task.part, "stream"):
                sums[name, part] += run.totals
        if task.temperature == 0.0 and any(text != texts[0] for text in texts):
            raise RuntimeError(f"two systems wrote different texts in request {number} ({task.part}): one is not exact")
    return [Cell(name, part, totals) for (name, part), totals in sums.items()]


def compared(
    cells: Sequence[Cell], names: Sequence[str], plain: str, ours: str | None = None, single: bool = False
) -> Table:
    """Returns tokens per second relative to ``plain``, and in brackets tokens per pass; the best system has a star.

    The last line is ``ours`` over the best other system of each column or, if ``single``, over the best of the stream.
    """
    totals = {(cell.system, cell.part): cell.totals for cell in cells}
    columns = [part for part in dict.fromkeys(cell.part for cell in cells) if part != "stream"] + ["stream"]
    others = [name for name in names if name != ours]
    best = {part: max((totals[name, part].speed, name) for name in others)[1] for part in columns}
    rows = []
    for name in names:
        line = [name]
        for part in columns:
            cell, base = totals[name, part], totals[plain, part]
            star = "*" if best[part] == name else ""
            line.append(f"{cell.speed / base.speed:.2f}x{star} ({cell.tokens_per_pass:.2f})")
        rows.append(line)
    if ours is not None:
        against = {part: best["stream" if single else part] for part in columns}
        ratios = (f"{totals[ours, part].speed / totals[against[part], part].speed:.3f}" for part in columns)
        rows.append([f"{ours} / {best['stream'] if single else 'best'}", *ratios])
    return figures(("system", *columns), rows)
