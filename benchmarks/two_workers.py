"""Drafting on one worker while another verifies: texts and speed, compared with drafting in the engine's own process.

    python benchmarks/two_workers.py --output two_workers.json
    python benchmarks/two_workers.py --rtt-ms 20 --ahead 2

One request at a time: at temperature 0, at temperature 1 in the distribution grade (where the output depends on the
drafts), and with a seed. "one worker" drafts and verifies in turns, on all cores. "waiting" drafts in a separate
process on request, "ahead" also while the target verifies. The last two divide the cores: --draft-threads for the
drafting process, the others for the target. --rtt-ms delays every message by half of it in each direction.

Systems take turns on every prompt, in rotating order. Texts must be equal token for token, and so must the drafts.
Where both workers share a machine, drafting ahead takes cores from the target, which the speed includes.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.progress import track
from rich.table import Table

from foretoken import zoo
from foretoken.bench.setting import cores, setting, wide_console
from foretoken.bench.workloads import FUNCTIONS, load_prompts
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.propose.base import BuildContext, Proposer
from foretoken.propose.remote import Remote, RemoteConfig, start_worker
from foretoken.propose.remote_transports import Disconnected, EngineEndpoint, MessageQueue
from foretoken.speculation import Builder, SpeculativeConfig
from foretoken.train.widen.checkpoint import scaled

KINDS: Mapping[str, tuple[float, Exactness]] = {
    "greedy": (0.0, Exactness.DISTRIBUTION),
    "drawn": (1.0, Exactness.DISTRIBUTION),
    "seeded": (1.0, Exactness.TRAJECTORY),
}
ONE = "one worker"


def delayed(link: EngineEndpoint, seconds: float) -> EngineEndpoint:
    """Returns an endpoint whose messages arrive ``seconds`` late in both directions, in order."""
    incoming: MessageQueue = queue.SimpleQueue()
    send, deliver = late(link.send, seconds), late(incoming.put, seconds)

    def fetch() -> None:
        with suppress(Disconnected):
            while True:
                deliver(link.receive())
        deliver(None)

    threading.Thread(target=fetch, daemon=True).start()
    return EngineEndpoint(send, incoming, link.worker, link.close)


def late(deliver: Callable[[Any], None], seconds: float) -> Callable[[Any], None]:
    """Returns a function that calls ``deliver`` after ``seconds``, without waiting."""
    messages: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()

    def carry() -> None:
        with suppress(Disconnected):
            while True:
                arrival, message = messages.get()
                time.sleep(max(0.0, arrival - time.monotonic()))
                deliver(message)

    threading.Thread(target=carry, daemon=True).start()
    return lambda message: messages.put((time.monotonic() + seconds, message))


@dataclass
class System:
    """One way to draft. threads: the target's. seconds: by kind, for each repeat; ready, steps: drafts."""

    name: str
    engine: Engine
    proposer: Proposer
    threads: int
    texts: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)

    def run(self, kind: str, prompt: int, ids: Sequence[int], tokens: int, repeat: int) -> None:
        """Completes one prompt. Raises RuntimeError if a repeat generates another text."""
        torch.set_num_threads(self.threads)
        temperature, grade = KINDS[kind]
        law = SamplingLaw(temperature=temperature)
        context = Context(prompt, list(ids), len(ids), law, Streams(prompt + 1), grade)
        remote = self.proposer if isinstance(self.proposer, Remote) else None
        before = (remote.drafts_needed, remote.drafts_ready) if remote else (0, 0)
        self.engine.add(context, Length(tokens))
        steps: list[Any] = []
        started = time.perf_counter()
        while self.engine.busy:
            steps += [(step.tokens, step.draft.ids) for step in self.engine.step()]
        seconds = time.perf_counter() - started
        self.engine.take(prompt)
        if self.texts.setdefault((kind, prompt), steps) != steps:
            raise RuntimeError(f"{self.name} wrote another text, or drafted otherwise, in a repeat ({kind}, {prompt})")
        own = self.seconds.setdefault(kind, [])
        own += [0.0] * (repeat + 1 - len(own))
        own[repeat] += seconds
        add(self.passes, kind, len(steps))
        add(self.tokens, kind, sum(len(each) for each, _ in steps))
        if isinstance(self.proposer, Remote):
            add(self.steps, kind, self.proposer.drafts_needed - before[0])
            add(self.ready, kind, self.proposer.drafts_ready - before[1])


@dataclass(frozen=True)
class Cell:
    """Result of one system and kind. speed: tokens/s, median of the repeats. ready: share of drafts that had arrived.

    same: prompts whose text and drafts equal, step by step, those of one worker.
    """

    system: str
    kind: str
    speed: float
    tokens_per_pass: float
    ready: float | None
    same: int
    prompts: int


def add(counts: dict[str, int], key: str, value: int) -> None:
    counts[key] = counts.get(key, 0) + value


def systems(
    target: Path, draft: Path, depth: int, ahead: int, threads: int, rtt: float, transport: str
) -> list[System]:
    """Returns one worker, one that drafts on request, and one that drafts ahead; the last two share a target."""
    tokenizer = load_tokenizer(target)
    member = {"method": "draft_model", "model": str(draft)}

    def build(proposer_of: Any, name: str, count: int, model: Any) -> System:
        proposer = proposer_of(Builder(model, tokenizer, target, load_model))
        return System(name, Engine(model, proposer, Fixed(depth)), proposer, count)

    def local(builder: Builder) -> Proposer:
        return builder.build(SpeculativeConfig.of(member))

    def elsewhere(ahead: int) -> Any:
        def made(builder: Builder) -> Proposer:
            config = RemoteConfig(member, transport, ahead=ahead, threads=threads)
            link = start_worker(
                config, BuildContext(builder.target, tokenizer, target, None, load_model, builder.member)
            )
            return Remote(delayed(link, rtt / 2) if rtt else link)

        return made

    torch.set_num_threads(cores())
    result = [build(local, ONE, cores(), load_model(target))]
    left = max(1, cores() - threads)
    torch.set_num_threads(left)
    shared = load_model(target)
    result.append(build(elsewhere(0), "two workers, waiting", left, shared))
    return [*result, build(elsewhere(ahead), f"two workers, {ahead} ahead", left, shared)]


def cells(systems: Sequence[System], prompts: int) -> list[Cell]:
    """Returns the results by kind and system."""
    made = []
    for kind in KINDS:
        for system in systems:
            repeats = len(system.seconds[kind])
            speed = median(system.tokens[kind] / repeats / seconds for seconds in system.seconds[kind])
            steps = system.steps.get(kind)
            same = sum(system.texts[kind, at] == systems[0].texts[kind, at] for at in range(prompts))
            ready = system.ready[kind] / steps if steps else None
            density = system.tokens[kind] / system.passes[kind]
            made.append(Cell(system.name, kind, speed, density, ready, same, prompts))
    return made


def table(cells: Sequence[Cell]) -> Table:
    """Returns a table with a line for each result."""
    made = Table(box=box.MARKDOWN)
    for head in ("texts", "system", "tokens/s", "over one worker", "tokens/pass", "ready ahead", "same as one worker"):
        made.add_column(head, justify="left" if head in ("texts", "system") else "right")
    for cell in cells:
        base = next(each for each in cells if each.kind == cell.kind and each.system == ONE)
        made.add_row(
            cell.kind,
            cell.system,
            f"{cell.speed:.1f}",
            f"{cell.speed / base.speed:.2f}x",
            f"{cell.tokens_per_pass:.2f}",
            "" if cell.ready is None else f"{cell.ready:.0%}",
            f"{cell.same}/{cell.prompts}",
        )
    return made


def main(
    target: Annotated[Path | None, typer.Option(help="Default: the bundled one, widened to 0.7 B.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Default: the bundled one.")] = None,
    small: Annotated[bool, typer.Option("--small", help="The bundled target as it is.")] = False,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with a prompt each.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 6,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a completion.")] = 96,
    depth: Annotated[int, typer.Option(min=1, help="Draft tokens per step.")] = 4,
    ahead: Annotated[int, typer.Option(min=1, help="Steps that are drafted ahead.")] = 1,
    draft_threads: Annotated[int, typer.Option(min=1, help="Cores of the drafting process.")] = 1,
    rtt_ms: Annotated[float, typer.Option(min=0.0, help="Artificial network delay between the workers.")] = 0.0,
    transport: Annotated[str, typer.Option(help="process, thread or ray.")] = "process",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--output", help="Write setting and cells here.")] = None,
) -> None:
    """Prints texts and tokens per second of one worker and of two."""
    path = target or (zoo.path("target") if small else scaled())
    ways = systems(path, draft or zoo.path("draft"), depth, ahead, draft_threads, rtt_ms / 1e3, transport)
    tokenizer = load_tokenizer(path)
    texts = (load_prompts(prompts) if prompts else list(FUNCTIONS))[:count]
    ids = [list(tokenizer.encode(text)) for text in texts]
    turns = [(repeat, kind, at) for repeat in range(repeats) for kind in KINDS for at in range(len(ids))]
    for system in ways:
        system.run("greedy", 0, ids[0], tokens, 0)
        for record in (system.seconds, system.passes, system.tokens, system.steps, system.ready):
            record.clear()
    for turn, (repeat, kind, at) in enumerate(track(turns, description="requests", transient=True)):
        for system in ways[turn % 3 :] + ways[: turn % 3]:
            system.run(kind, at, ids[at], tokens, repeat)
    made = cells(ways, len(ids))
    console = wide_console()
    console.print(table(made))
    facts: dict[str, Any] = setting() | {
        "target": path.name,
        "count": len(ids),
        "tokens": tokens,
        "depth": depth,
        "ahead": ahead,
        "rtt_ms": rtt_ms,
        "transport": transport,
        "threads": f"{cores()} for one worker, {ways[1].threads} + {draft_threads} for two",
        "repeats": repeats,
    }
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    if json_file is not None:
        result = {"setting": facts, "cells": [asdict(cell) for cell in made]}
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for system in ways[1:]:
        system.proposer.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    typer.run(main)
