"""Passes of several models in turns, and the least that they could take: reading memory, and multiplying alone."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretoken.bench.clock import TimedTask, interleaved
from foretoken.bench.costs import chain, scoring
from foretoken.bench.setting import cores
from foretoken.core.native.build import compiled
from foretoken.models.base import Handle, Model

_PRODUCTS = 64  # of one vpdpbusd


class Floors:
    """Tasks that take the least time that the machine allows, on all cores.

    Args:
        max_bytes: The most memory that is read.
        flags: Compiler flags; vpdpbusd needs "-mavx512vnni".
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


def last_logits(model: Model, handle: Handle, rows: int) -> torch.Tensor:
    """Returns the logits of a pass over ``rows`` rows, which is rewound."""
    with torch.inference_mode():
        logits = model.score([handle], [chain(rows)])[0].logits.clone()
    model.commit([handle], [()])
    return logits


def pass_times(models: Mapping[str, Model], rows: Sequence[int], context: int, turns: int) -> list[dict[str, Any]]:
    """Times passes of models that compute the same, in turns.

    Returns:
        For each number of rows, "rows", the median "seconds" by model, and "same_bits", whether the logits are equal.
    """
    prompt = [(7 * i) % 1000 + 1 for i in range(context)]
    handles = {name: model.open(prompt) for name, model in models.items()}
    logits: dict[str, torch.Tensor] = {}
    result = []
    for count in rows:
        tasks = {name: scoring(model, [handles[name]], count) for name, model in models.items()}
        spreads = interleaved(tasks, turns)
        for name, model in models.items():
            logits[name] = last_logits(model, handles[name], count)
        first, *others = (rows.view(torch.int32) for rows in logits.values())
        same = all(torch.equal(first, other) for other in others)
        medians = {name: spread.median for name, spread in spreads.items()}
        result.append({"rows": count, "seconds": medians, "same_bits": same})
    return result
