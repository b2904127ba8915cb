"""What passes cost on this machine: measured once for a checkpoint, kept, and read between the measured points.

Curves are jagged (four rows may cost what one costs, and five half as much again), so nothing is fitted to them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import foretoken
from foretoken.bench.clock import TimeSpread
from foretoken.bench.costs import Loaded, PassCost, pass_costs
from foretoken.bench.setting import memory, processor
from foretoken.core.errors import WriteError
from foretoken.core.schema import read_object
from foretoken.zoo import cache_folder

ROWS, CONTEXT, TURNS = (1, 2, 4, 6, 8, 12, 16), 256, 5
_FORMAT = 1  # of what is kept; another number measures anew


@dataclass(frozen=True)
class Costs:
    """Of one checkpoint as it was loaded. name: its folder's. identity: what was measured, and on what machine."""

    name: str
    identity: str
    passes: tuple[PassCost, ...] = ()

    def seconds(self, rows: int, batch: int = 1, context: int = CONTEXT) -> float:
        """A pass over ``rows`` rows of each of ``batch`` sequences: between neighbours, at the context that is nearest.

        Beyond the largest that was measured the cost grows as the last two points say. Raises KeyError for a batch that
        was not measured.
        """
        known = [cost for cost in self.passes if cost.batch == batch]
        if not known:
            raise KeyError(f"no passes over {batch} sequences were measured")
        nearest = min((abs(cost.context - context), cost.context) for cost in known)[1]
        points = sorted((cost.rows, cost.seconds.median) for cost in known if cost.context == nearest)
        sizes, times = [size for size, _ in points], [time for _, time in points]
        if rows > sizes[-1] and len(points) > 1:
            slope = max(0.0, (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))
            return times[-1] + slope * (rows - sizes[-1])
        return float(np.interp(rows, sizes, times))

    def merged(self, passes: Sequence[PassCost]) -> Costs:
        """With ``passes``, which take the place of older ones of the same shape."""
        known = {_shape(cost): cost for cost in (*self.passes, *passes)}
        return replace(self, passes=tuple(known[shape] for shape in sorted(known)))

    def lacks(self, rows: Sequence[int], contexts: Sequence[int], batches: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(context, batch) of which not all ``rows`` are known."""
        known = {_shape(cost) for cost in self.passes}
        for context in contexts:
            for batch in batches:
                if any((batch, context, m) not in known for m in rows):
                    yield context, batch

    def save(self) -> None:
        """Keep them. Raises WriteError."""
        file = _file(self.identity)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
                made = Path(scratch) / file.name
                record = {"name": self.name, "passes": [asdict(cost) for cost in self.passes]}
                made.write_text(json.dumps(record) + "\n", encoding="utf-8")
                os.replace(made, file)
        except OSError as error:
            raise WriteError(
                f"cannot keep the measured costs in {file.parent}: {error}; set FORETOKEN_CACHE to a folder of yours"
            ) from error

    def to_dict(self) -> list[dict[str, Any]]:
        """One entry for each pass; times in seconds."""
        return [asdict(cost) for cost in self.passes]


def known(loaded: Loaded) -> Costs:
    """What is kept of this checkpoint on this machine; nothing where none was measured, or the file is not ours."""
    identity = identify(loaded)
    empty = Costs(loaded.path.name, identity)
    try:
        record = read_object(_file(identity))
        return empty.merged([_read(entry) for entry in record["passes"]])
    except (OSError, ValueError, KeyError, TypeError):
        return empty


def measured(
    loaded: Loaded,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = (CONTEXT,),
    batches: Sequence[int] = (1,),
    turns: int = TURNS,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> Costs:
    """What is kept, and what is missing measured and kept too. Where it cannot be kept it is measured all the same."""
    costs = known(loaded)
    found: list[PassCost] = []
    for context, batch in costs.lacks(rows, contexts, batches):
        found += pass_costs(loaded, rows, [context], turns, batch, track)
    if found:
        costs = costs.merged(found)
        try:
            costs.save()
        except WriteError:
            return costs
    return costs


def has_room(loaded: Loaded) -> bool:
    """Whether a second copy of the weights, which the bandwidth floor may need, leaves memory to spare."""
    return memory("MemAvailable") > 2 * loaded.file_bytes


def identify(loaded: Loaded) -> str:
    """A digest of all that a pass's time depends on: weights, types, threads, processor and version."""
    files = sorted(loaded.path.glob("*.safetensors"))
    facts = [
        _FORMAT, foretoken.__version__, torch.__version__, str(loaded.path.resolve()),
        [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        str(loaded.model.dtype), loaded.quantization, str(loaded.model.device), _device(loaded.model.device),
        torch.get_num_threads(), type(getattr(loaded.model, "runner", loaded.model)).__name__,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def _file(identity: str) -> Path:
    return cache_folder() / "costs" / f"{identity}.json"


def _shape(cost: PassCost) -> tuple[int, int, int]:
    return cost.batch, cost.context, cost.rows


def _read(entry: dict[str, Any]) -> PassCost:
    floor = entry.pop("floor")
    seconds = TimeSpread(**entry.pop("seconds"))
    return PassCost(**entry, seconds=seconds, floor=None if floor is None else TimeSpread(**floor))
