"""Engines that are timed step by step, proposers for a target, and the least time that a pass could take."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from foretoken.bench.measure import TimedTask
from foretoken.bench.output import cores
from foretoken.control.fixed import Fixed
from foretoken.core.native.build import compiled
from foretoken.core.step import StepOutput
from foretoken.engine.loop import Engine
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.speculation import Builder, SpeculativeConfig


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


def timed_step(engine: Engine) -> tuple[list[StepOutput], Totals]:
    """Runs one step of an engine. Returns its outputs and totals."""
    started = perf_counter()
    steps = engine.step()
    seconds = perf_counter() - started
    tokens, drafted = sum(len(step.tokens) for step in steps), sum(len(step.draft) for step in steps)
    return steps, Totals(tokens, len(steps), seconds, drafted, sum(step.accepted for step in steps))


def builder_of(target: Path, **options: Any) -> Builder:
    """Returns a builder of proposers for a target. All models are loaded with ``options``."""

    def load(other: str | Path, **more: Any) -> Model:
        return load_model(Path(other), **options, **more)

    return Builder(load(target), load_tokenizer(target), target, load)


def fixed_engine(builder: Builder, config: Mapping[str, Any], depth: int | None = None, **options: Any) -> Engine:
    """Returns an engine with a fixed draft length, that of the configuration unless ``depth`` is given."""
    speculative = SpeculativeConfig.of(config)
    fixed = Fixed(speculative.tokens if depth is None else depth)
    return Engine(builder.target, builder.build(speculative), fixed, **options)


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
