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

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from foretoken import zoo
from foretoken.bench.output import cores, listing, progress, report
from foretoken.bench.workloads import prompts_or_functions
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.propose.base import BuildContext
from foretoken.propose.remote import Remote, RemoteConfig, start_worker
from foretoken.propose.remote_transports import Disconnected, EngineEndpoint, MessageQueue
from foretoken.speculation import Builder, SpeculativeConfig
from options import Draft, Output, Prompts, Repeats, Small, Target, target_path
from systems import Totals, timed_step

KINDS: Mapping[str, tuple[float, Exactness]] = {
    "greedy": (0.0, Exactness.DISTRIBUTION),
    "drawn": (1.0, Exactness.DISTRIBUTION),
    "seeded": (1.0, Exactness.TRAJECTORY),
}
ONE = "one worker"
COLUMNS = {
    "texts": "{kind}",
    "system": "{system}",
    "tokens/s": "{speed:.1f}",
    "over one worker": "{over_one:.2f}x",
    "tokens/pass": "{tokens_per_pass:.2f}",
    "ready ahead": "{ready:.0%}",
    "same as one worker": "{same}/{prompts}",
}


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
class Worker:
    """One way to draft. threads: the target's. totals: by kind, for each repeat. drafts, ready: needed, and arrived."""

    name: str
    engine: Engine
    threads: int
    texts: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    totals: dict[str, list[Totals]] = field(default_factory=lambda: defaultdict(list))
    drafts: Counter[str] = field(default_factory=Counter)
    ready: Counter[str] = field(default_factory=Counter)

    def run(self, kind: str, prompts: Sequence[list[int]], at: int, tokens: int) -> None:
        """Completes one prompt; the first one begins a repeat. Raises RuntimeError if a repeat differs from another."""
        torch.set_num_threads(self.threads)
        temperature, grade = KINDS[kind]
        law, ids, remote = SamplingLaw(temperature=temperature), prompts[at], self.engine.proposer
        before = (remote.drafts_needed, remote.drafts_ready) if isinstance(remote, Remote) else (0, 0)
        self.engine.add(Context(at, list(ids), len(ids), law, Streams(at + 1), grade), Length(tokens))
        steps, total = list[Any](), Totals()
        while self.engine.busy:
            outputs, step_totals = timed_step(self.engine)
            steps += [(step.tokens, step.draft.ids) for step in outputs]
            total += step_totals
        self.engine.take(at)
        if self.texts.setdefault((kind, at), steps) != steps:
            raise RuntimeError(f"{self.name} wrote another text, or drafted otherwise, in a repeat ({kind}, {at})")
        self.totals[kind] += [total] if at == 0 else [self.totals[kind].pop() + total]
        if isinstance(remote, Remote):
            self.drafts[kind] += remote.drafts_needed - before[0]
            self.ready[kind] += remote.drafts_ready - before[1]

    def result(self, kind: str, first: "Worker", prompts: int) -> dict[str, Any]:
        """Returns the figures of one kind, beside those of the first worker.

        speed: tokens/s, median of the repeats. ready: fraction of drafts that had arrived. same: prompts whose text and
        drafts equal, step by step, those of the first worker.
        """
        speed, base = (median(total.speed for total in each.totals[kind]) for each in (self, first))
        same = sum(self.texts[kind, at] == first.texts[kind, at] for at in range(prompts))
        ready = self.ready[kind] / self.drafts[kind] if self.drafts[kind] else None
        passes = sum(self.totals[kind], Totals()).tokens_per_pass
        row = {"system": self.name, "kind": kind, "speed": speed, "over_one": speed / base, "ready": ready}
        return row | {"tokens_per_pass": passes, "same": same, "prompts": prompts}


def workers(
    target: Path, draft: Path, depth: int, ahead: int, threads: int, rtt: float, transport: str
) -> list[Worker]:
    """Returns one worker, one that drafts on request, and one that drafts ahead; the last two share a target."""
    tokenizer = load_tokenizer(target)
    member = {"method": "draft_model", "model": str(draft)}

    def elsewhere(model: Model, steps: int) -> Remote:
        config, builder = RemoteConfig(member, transport, ahead=steps, threads=threads), builder_of(model)
        link = start_worker(config, BuildContext(model, tokenizer, target, None, load_model, builder.member))
        return Remote(delayed(link, rtt / 2) if rtt else link)

    def builder_of(model: Model) -> Builder:
        return Builder(model, tokenizer, target, load_model)

    torch.set_num_threads(cores())
    model, left = load_model(target), max(1, cores() - threads)
    local = builder_of(model).build(SpeculativeConfig.of(member))
    result = [Worker(ONE, Engine(model, local, Fixed(depth)), cores())]
    torch.set_num_threads(left)
    shared = load_model(target)
    for name, steps in (("two workers, waiting", 0), (f"two workers, {ahead} ahead", ahead)):
        result.append(Worker(name, Engine(shared, elsewhere(shared, steps), Fixed(depth)), left))
    return result


def main(
    target: Target = None,
    draft: Draft = None,
    small: Small = False,
    prompts: Prompts = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 6,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a completion.")] = 96,
    depth: Annotated[int, typer.Option(min=1, help="Draft tokens per step.")] = 4,
    ahead: Annotated[int, typer.Option(min=1, help="Steps that are drafted ahead.")] = 1,
    draft_threads: Annotated[int, typer.Option(min=1, help="Cores of the drafting process.")] = 1,
    rtt_ms: Annotated[float, typer.Option(min=0.0, help="Artificial network delay between the workers.")] = 0.0,
    transport: Annotated[str, typer.Option(help="process, thread or ray.")] = "process",
    repeats: Repeats = 3,
    output: Output = None,
) -> None:
    """Prints texts and tokens per second of one worker and of two."""
    path = target_path(target, small)
    ways = workers(path, draft or zoo.path("draft"), depth, ahead, draft_threads, rtt_ms / 1e3, transport)
    tokenizer = load_tokenizer(path)
    ids = [list(tokenizer.encode(text)) for text in prompts_or_functions(prompts, count)]
    turns = [(kind, at) for _ in range(repeats) for kind in KINDS for at in range(len(ids))]
    for worker in ways:
        worker.run("greedy", ids, 0, tokens)
        for record in (worker.totals, worker.drafts, worker.ready):
            record.clear()
    for turn, (kind, at) in enumerate(progress(turns, "requests")):
        for worker in ways[turn % 3 :] + ways[: turn % 3]:
            worker.run(kind, ids, at, tokens)
    made = [worker.result(kind, ways[0], len(ids)) for kind in KINDS for worker in ways]
    facts: dict[str, Any] = {"target": path.name, "count": len(ids), "tokens": tokens, "depth": depth, "ahead": ahead}
    facts |= {"rtt_ms": rtt_ms, "transport": transport, "repeats": repeats}
    facts["threads"] = f"{cores()} for one worker, {ways[1].threads} + {draft_threads} for two"
    report([listing(COLUMNS, made)], facts, output, cells=made)
    for worker in ways[1:]:
        assert isinstance(worker.engine.proposer, Remote)
        worker.engine.proposer.close()


if __name__ == "__main__":
    typer.run(main)
