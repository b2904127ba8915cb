"""A mixed stream of requests: proposers, their mixture and the draft policy, in turns of a few steps.

    python benchmarks/streams.py --output mixture.json                  # five proposers and their mixture
    python benchmarks/streams.py --policy --crowd 16 --hot 1.5 --depth 2 --depth 4 --depth 8 \
        --config '{"method": "draft_model"}'                            # the policy beside fixed draft lengths
    python benchmarks/streams.py --part editing --decode-only --config '{"method": "suffix"}'

A stream has three parts, which alternate. completion: functions to complete freely. editing: a function, then the same
function with a rename and a fix, with the original as the client's prediction. repetition: one pattern repeated with
other words in it. The output of the last two is forced (``foretoken.bench.editing``). ``--hot`` and ``--crowd`` add
parts: every completion at a high temperature, and in a batch.

Figures are total tokens over total seconds relative to plain decoding. Systems keep what they learn from request to
request, and start empty. The policy learns within the stream, apart from the warm-up of every ``LLM``.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice, product, zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from rich.table import Table

from foretoken import zoo
from foretoken.bench.editing import ForcedOutput, editing_tasks
from foretoken.bench.output import cores, figures, report
from foretoken.bench.workloads import prompts_or_functions
from foretoken.control.config import build
from foretoken.core.context import Context
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.engine.warmup import warm_up
from foretoken.models.formats.checkpoint import resolve
from foretoken.propose.union import Union
from foretoken.speculation import Builder, SpeculativeConfig
from options import Draft, Output, Prompts, Repeats, Small, target_path
from systems import Totals, builder_of, fixed_engine, timed_step

PLAIN, MIXTURE, POLICY = "plain", "mixture", "policy"
PARTS = ("completion", "editing", "repetition")
MEMBERS = (
    '{"method": "suffix"}',
    '{"method": "prediction"}',
    '{"method": "recycling"}',
    '{"method": "ngram"}',
    '{"method": "draft_model", "num_speculative_tokens": 6}',
)
_MAX_REQUESTS = 256  # requests of one task
_STRETCH = 8  # consecutive steps of one system
_WORDS = (
    *("north", "east", "south", "west", "red", "green", "blue", "black"),
    *("apple", "pear", "plum", "fig", "iron", "tin", "zinc", "lead"),
)
_PATTERNS = (
    "    assert parse('{0}: {1}') == ('{0}', '{1}')\n",
    "    {{'name': '{0}', 'colour': '{1}', 'size': {2}}},\n",
    "register('{0}', handler=on_{0}, fallback=on_{1}, timeout={2})\n",
    "INSERT INTO items (name, origin, amount) VALUES ('{0}', '{1}', {2});\n",
)


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


def with_variants(stream: Sequence[Task], hot: float, crowd: int) -> Iterator[Task]:
    """Yields every task, and each completion also at the temperature ``hot`` and in a batch of ``crowd`` requests."""
    others = cycle(task.prompt for task in stream if task.part == "completion")
    for task in stream:
        yield task
        if task.part == "completion" and hot:
            yield replace(task, part="hot", temperature=hot)
        if task.part == "completion" and crowd > 1:
            yield replace(task, part="crowd", beside=tuple(islice(others, crowd - 1)))


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


Sums = dict[tuple[str, str], Totals]  # by system and part; the part "stream" is all of it


def compare(engines: Mapping[str, Engine], stream: Sequence[Task], repeats: int, decode_only: bool) -> Sums:
    """Runs every task in every engine. Raises RuntimeError where two greedy texts differ."""
    sums: Sums = defaultdict(Totals)
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
    return sums


def table(sums: Sums, ours: str | None) -> Table:
    """Returns tokens per second relative to plain decoding, and in brackets tokens per pass; a star marks the best.

    The last lines are ``ours`` over the best other system of each part, and over the best of the whole stream.
    """
    names, parts = (list(dict.fromkeys(key[at] for key in sums)) for at in (0, 1))
    parts.append(parts.pop(parts.index("stream")))
    others = [name for name in names if name != ours]
    best = {part: max((sums[name, part].speed, name) for name in others)[1] for part in parts}
    rows = []
    for name in names:
        cells = [(sums[name, part], sums[PLAIN, part], "*" * (best[part] == name)) for part in parts]
        rows.append([name, *(f"{a.speed / b.speed:.2f}x{star} ({a.tokens_per_pass:.2f})" for a, b, star in cells)])
    for title, against in (("best", best), (best["stream"], dict.fromkeys(parts, best["stream"]))) if ours else ():
        ratios = (f"{sums[str(ours), part].speed / sums[against[part], part].speed:.3f}" for part in parts)
        rows.append([f"{ours} / {title}", *ratios])
    return figures(("system", *parts), rows)


def best_by_part(sums: Sums) -> float:
    """Returns the speedup of each part's best fixed system over the best single one, on the whole stream."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for (system, part), totals in sums.items():
        if system not in (POLICY, MIXTURE):
            seconds[part].append(totals.seconds)
    whole = seconds.pop("stream")
    return min(whole) / sum(map(min, seconds.values()))


def named(text: str, draft: Path | None) -> tuple[str, dict[str, Any]]:
    """Returns a configuration given as JSON and its name. Draft models without a path are ``draft``."""
    config = json.loads(text)
    name = " ".join(str(value) if key == "method" else f"{key}={value}" for key, value in config.items())
    return name, config | ({"model": str(draft)} if config["method"] == "draft_model" and "model" not in config else {})


def policy_engine(builder: Builder, config: SpeculativeConfig) -> Engine:
    """Returns an engine whose draft policy is warmed up as that of an ``LLM``."""
    proposer = builder.build(config)
    warm_up(builder.target, proposer, builder.costs, config.max_tokens)
    controller = build(config.control_in_force, config.max_tokens, builder.target.device, builder.policy)
    return Engine(builder.target, Union.of(proposer, builder.policy), controller)


def main(
    target: Annotated[
        str | None, typer.Option(help="Folder or hub name. [the bundled target, widened to 0.7 B]")
    ] = None,
    small: Small = False,
    draft: Draft = None,
    config: Annotated[list[str], typer.Option(help="A proposer as JSON; may be repeated.")] = [*MEMBERS],
    depth: Annotated[list[int], typer.Option(help="Of every proposer; may be repeated. [its own]")] = [],
    mixture: Annotated[bool, typer.Option(help="The mixture of all proposers, with a fixed length.")] = True,
    policy: Annotated[bool, typer.Option("--policy", help="The draft policy on the proposer or the mixture.")] = False,
    part: Annotated[list[str], typer.Option(help=f"{', '.join(PARTS)}; may be repeated.")] = [*PARTS],
    prompts: Prompts = None,
    count: Annotated[int, typer.Option(min=1, help="Requests of each part.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 128,
    hot: Annotated[float, typer.Option(min=0.0, help="Temperature of further completions; 0 adds none.")] = 0.0,
    crowd: Annotated[int, typer.Option(min=0, help="Requests at once of further completions; 0 adds none.")] = 0,
    decode_only: Annotated[bool, typer.Option("--decode-only", help="Steps that hold a prompt do not count.")] = False,
    repeats: Repeats = 2,
    dtype: str = "auto",
    device: str = "auto",
    quantization: Annotated[str | None, typer.Option(help="Quantization of the models, such as int8.")] = None,
    output: Output = None,
) -> None:
    """Prints tokens per second of each proposer, of their mixture and of the draft policy, by part and in total."""
    torch.set_num_threads(cores())
    path = resolve(target) if target is not None else target_path(None, small)
    builder = builder_of(path, max_length=4096, dtype=dtype, device=device, quantization=quantization)
    builder = replace(builder, target=ForcedOutput(builder.target))
    members = dict(named(text, draft or zoo.path("draft")) for text in config)
    together = {"method": "mixture", "members": list(members.values())}
    engines = {PLAIN: fixed_engine(builder, {"method": "none"})}
    for (name, member), length in product(members.items(), [*depth] or (None,)):
        engines[f"{name} {length or ''}".strip()] = fixed_engine(builder, member, length)
    if mixture and not policy and len(members) > 1:
        engines[MIXTURE] = fixed_engine(builder, together)
    if policy:
        one = next(iter(members.values())) if len(members) == 1 else together
        engines[POLICY] = policy_engine(builder, SpeculativeConfig.of(one))
    stream = list(tasks(builder.tokenizer, prompts_or_functions(prompts), count, tokens))
    stream = [task for task in with_variants(stream, hot, crowd) if task.part in (*part, "hot", "crowd")]
    sums = compare(engines, stream, repeats, decode_only)
    ours = next((name for name in (POLICY, MIXTURE) if name in engines), None)
    bound = f"each part at its own best system, known beforehand: {best_by_part(sums):.3f} of the best single one"
    cells = [
        {"system": system, "part": name, **asdict(totals), "tokens_per_second": totals.speed}
        for (system, name), totals in sums.items()
    ]
    facts = {"target": path.name, "members": list(members), "count": count, "tokens": tokens, "repeats": repeats}
    report([table(sums, ours), bound], facts | {"hot": hot, "crowd": crowd}, output, cells=cells)


if __name__ == "__main__":
    typer.run(main)
