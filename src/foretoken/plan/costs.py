"""Measures what forward passes of a checkpoint cost on this machine, once, and keeps it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

import foretoken
from foretoken.bench.costs import Loaded, pass_costs
from foretoken.bench.setting import memory, processor
from foretoken.core.errors import WriteError
from foretoken.costs.measured import CONTEXT, MeasuredCosts, PassCost

ROWS, TURNS = (1, 2, 4, 6, 8, 12, 16), 5
_FORMAT = 1  # of the file; another number measures again


def known(loaded: Loaded) -> MeasuredCosts:
    """Returns the saved costs of this checkpoint on this machine."""
    return MeasuredCosts.load(loaded.path.name, identify(loaded))


def measured(
    loaded: Loaded,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = (CONTEXT,),
    batches: Sequence[int] = (1,),
    turns: int = TURNS,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> MeasuredCosts:
    """Returns the saved costs of passes over ``rows`` of a checkpoint; missing ones are measured and saved.

    Args:
        contexts: Tokens before the rows.
        batches: Sequences that share a pass.
        turns: Passes of each kind.
        track: Wraps the turns for progress.
    """
    costs = known(loaded)
    results: list[PassCost] = []
    for context, batch in costs.lacks(rows, contexts, batches):
        results += pass_costs(loaded, rows, [context], turns, batch, track)
    if results:
        costs = costs.merged(results)
        with suppress(WriteError):  # measured all the same
            costs.save()
    return costs


def has_room(loaded: Loaded) -> bool:
    """Returns whether there is memory for a second copy of the weights, to measure the bandwidth limit."""
    return memory("MemAvailable") > 2 * loaded.file_bytes


def identify(loaded: Loaded) -> str:
    """Returns a digest of all that a pass's time depends on: weights, types, threads, processor and version."""
    files = sorted(loaded.path.glob("*.safetensors"))
    facts = [
        _FORMAT,
        foretoken.__version__,
        torch.__version__,
        str(loaded.path.resolve()),
        [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        str(loaded.model.dtype),
        loaded.quantization,
        loaded.weight_format,
        loaded.model.kv_bytes_per_token,
        str(loaded.model.device),
        _device(loaded.model.device),
        torch.get_num_threads(),
        type(getattr(loaded.model, "runner", loaded.model)).__name__,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
