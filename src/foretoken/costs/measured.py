"""Seconds of forward passes by rows, batch and context, measured once for a checkpoint and kept for the machine."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from foretoken.core.errors import WriteError
from foretoken.core.files import atomic_file, cache_folder
from foretoken.core.schema import read_object
from foretoken.costs.curve import Curve

CONTEXT = 256  # default number of tokens before a pass


@dataclass(frozen=True)
class TimeSpread:
    """Seconds of a task over its turns."""

    median: float
    low: float
    high: float
    turns: int

    @staticmethod
    def of(seconds: Sequence[float]) -> "TimeSpread":
        """Returns the spread of the seconds of each turn."""
        return TimeSpread(median(seconds), min(seconds), max(seconds), len(seconds))


@dataclass(frozen=True)
class PassCost:
    """Cost of a pass over ``rows`` rows of each of ``batch`` sequences after ``context`` tokens."""

    rows: int
    context: int
    batch: int
    seconds: TimeSpread
    # seconds of the bare matrix products, in the same run; None if there is no bare kernel to time
    floor: TimeSpread | None
    kv_bytes: int  # bytes of KV cache that the pass reads
    weights_bytes: int  # bytes of weights that the pass reads

    @property
    def over_floor(self) -> float | None:
        """Ratio to the bare matrix products."""
        return self.seconds.median / self.floor.median if self.floor else None

    @property
    def over_read(self) -> float | None:
        """Ratio to reading weights and KV cache at the bandwidth of the bare products."""
        ratio = self.over_floor
        return ratio / (1 + self.kv_bytes / self.weights_bytes) if ratio else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, context and rows."""
        return self.batch, self.context, self.rows


@dataclass(frozen=True)
class MeasuredCosts:
    """Passes of one checkpoint as it was loaded."""

    name: str  # name of its folder
    identity: str  # digest of the checkpoint and the machine
    passes: tuple[PassCost, ...] = ()  # the measured passes

    @staticmethod
    def load(name: str, identity: str) -> "MeasuredCosts":
        """Returns the saved costs; none if no file exists or it is damaged."""
        empty = MeasuredCosts(name, identity)
        try:
            record = read_object(_file(identity))
            return empty.merged([_read(entry) for entry in record["passes"]])
        except (OSError, ValueError, KeyError, TypeError):
            return empty

    def seconds(self, rows: int, batch: int = 1, context: int = CONTEXT) -> float:
        """Returns the seconds of a pass over ``rows`` rows of each of ``batch`` sequences, at the nearest context.

        Seconds are linear between measured sizes; beyond the largest the slope of the last two continues. Raises
        KeyError if the batch was not measured.
        """
        known = [cost for cost in self.passes if cost.batch == batch]
        if not known:
            raise KeyError(f"no passes over {batch} sequences were measured")
        nearest = min((abs(cost.context - context), cost.context) for cost in known)[1]
        points = {cost.rows: cost.seconds.median for cost in known if cost.context == nearest}
        return Curve.of(points, exact=True).at(rows)

    def merged(self, passes: Sequence[PassCost]) -> "MeasuredCosts":
        """Returns the costs with ``passes``, which replace older ones of the same shape."""
        known = {cost.shape: cost for cost in (*self.passes, *passes)}
        return replace(self, passes=tuple(known[shape] for shape in sorted(known)))

    def lacks(self, rows: Sequence[int], contexts: Sequence[int], batches: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields each (context, batch) of which not all ``rows`` are known."""
        known = {cost.shape for cost in self.passes}
        for context in contexts:
            for batch in batches:
                if any((batch, context, m) not in known for m in rows):
                    yield context, batch

    def save(self) -> None:
        """Keeps the costs in the cache folder. Raises WriteError."""
        file = _file(self.identity)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(file) as partial:
                partial.write_text(json.dumps({"name": self.name, "passes": self.to_dict()}) + "\n", encoding="utf-8")
        except OSError as error:
            raise WriteError(
                f"cannot keep the measured costs in {file.parent}: {error}; set FORETOKEN_CACHE to a folder of yours"
            ) from error

    def to_dict(self) -> list[dict[str, Any]]:
        """Returns one entry per pass, with times in seconds."""
        return [asdict(cost) for cost in self.passes]


def _file(identity: str) -> Path:
    return cache_folder() / "costs" / f"{identity}.json"


def _read(entry: Mapping[str, Any]) -> PassCost:
    spreads = {key: TimeSpread(**entry[key]) if entry[key] else None for key in ("seconds", "floor")}
    return PassCost(**{**entry, **spreads})
