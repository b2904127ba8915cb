"""Systems that take turns of a few steps on one workload, and the least time that a pass could take."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from foretoken import LLM, SamplingParams
from foretoken.bench.editing import ForcedOutput
from foretoken.bench.measure import TimedTask
from foretoken.bench.output import cores
from foretoken.core.native.build import compiled
from foretoken.core.step import StepOutput
from foretoken.engine.loop import Engine
from foretoken.engine.requests import Assembler
from foretoken.models.base import Model


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
        return self.tokens / self.seconds if self.seconds else float("nan")

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else float("nan")


def timed_step(engine: Engine, use: Callable[[StepOutput], object] = id) -> tuple[list[StepOutput], Totals]:
    """Runs one step of an engine, and ``use`` on its outputs. Returns the outputs and the totals of both."""
    started = perf_counter()
    steps = engine.step()
    for step in steps:
        use(step)
    seconds = perf_counter() - started
    tokens, drafted = sum(len(step.tokens) for step in steps), sum(len(step.draft) for step in steps)
    return steps, Totals(tokens, len(steps), seconds, drafted, sum(step.accepted for step in steps))


@dataclass(frozen=True)
class Workload:
    """Prompts that are completed in one batch.

    cell: The line of results to which it counts. output: Tokens that are forced; None if the model generates freely.
    """

    cell: str
    prompts: Sequence[Any]
    params: SamplingParams
    output: Sequence[int] | None = None


class System:
    """An engine over the model of an ``LLM``. engine: Another one than that of the ``LLM``."""

    def __init__(self, llm: LLM, engine: Engine | None = None) -> None:
        self.llm, self.engine = llm, engine or llm.engine
        self._assembler = Assembler(self.engine, llm.tokenizer)
        self._texts: dict[int, tuple[int, ...] | None] = {}

    def add(self, work: Workload) -> None:
        """Queues the prompts of a workload."""
        self._texts.clear()
        for prompt in work.prompts:
            request, contexts = self.llm.requests.build(prompt, work.params)
            self._assembler.add(request, contexts)
            if isinstance(self.engine.target, ForcedOutput):
                self.engine.target.output, self.engine.target.prompt_length = work.output, contexts[0].prompt_length

    def prefill(self, count: int) -> None:
        """Runs steps until ``count`` sequences have their first tokens."""
        while self.engine.busy and len(self._texts) < count:
            self.advance(1)

    def advance(self, steps: int) -> Totals:
        """Runs at most ``steps`` steps, and detokenizes."""
        total = Totals()
        for _ in range(steps):
            if self.engine.busy:
                total += timed_step(self.engine, self._use)[1]
        return total

    @property
    def texts(self) -> list[tuple[int, ...] | None]:
        """Generated tokens of every finished sequence of the workload."""
        return [self._texts[number] for number in sorted(self._texts)]

    def _use(self, step: StepOutput) -> None:
        output = self._assembler.piece(step).output
        self._texts[step.sequence] = None if output is None else tuple(output.token_ids)


def take_turns(
    systems: Mapping[str, System], work: Workload, steps: int, order: random.Random, prefill: bool = True
) -> dict[str, Totals]:
    """Runs a workload in every system, ``steps`` steps at a time, in random order.

    prefill: Whether steps until every prompt has its first tokens count.

    Raises:
        RuntimeError: Two systems generated different greedy texts.
    """
    totals = dict.fromkeys(systems, Totals())
    for system in systems.values():
        system.add(work)
        if not prefill:
            system.prefill(len(work.prompts))
    while busy := [name for name, system in systems.items() if system.engine.busy]:
        for name in order.sample(busy, len(busy)):
            totals[name] += systems[name].advance(steps)
    texts = [system.texts for system in systems.values() if system.llm.target.batch_invariant]
    if work.params.temperature == 0.0 and any(other != texts[0] for other in texts):
        raise RuntimeError(f"two systems generated different texts of {work.cell!r}: one of them is not exact")
    return totals


def engine_on(target: Model, llm: LLM, **options: Any) -> Engine:
    """Returns an engine over ``target`` with the proposer and the controller of an ``LLM``."""
    shared = llm.engine
    return Engine(target, shared.proposer, shared.controller, rule=shared.rule, **options)


_PRODUCTS = 64  # of one vpdpbusd


class Floors:
    """Tasks that take the least time that the machine allows, on all cores.

    max_bytes: The most memory that is read. flags: Compiler flags; vpdpbusd needs "-mavx512vnni".
    """

    def __init__(self, max_bytes: int, *flags: str) -> None:
        self._library = ctypes.CDLL(str(compiled(Path(__file__).parent / "floors.cpp", flags)))
        self._library.read_memory.restype = self._library.multiply.restype = None
        self._block = torch.ones(max_bytes // 8 + 1024, dtype=torch.int64)

    def reading(self, size: int) -> TimedTask:
        """Returns the task of reading ``size`` bytes of memory."""
        address, length = ctypes.c_void_p(self._block.data_ptr()), ctypes.c_int64(size // 64 * 64)
        return TimedTask(partial(self._library.read_memory, address, length, cores()))

    def multiplying(self, products: int) -> TimedTask:
        """Returns the task of running as many vpdpbusd instructions as ``products`` need."""
        return TimedTask(partial(self._library.multiply, ctypes.c_int64(products // _PRODUCTS), cores()))
