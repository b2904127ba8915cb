"""What a pass costs by rows and context, beside its floor and beside transformers' own step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretoken.bench.clock import Spread, Task, interleaved
from foretoken.bench.floor import Floor, kv_bytes, matrices
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Handle, Model
from foretoken.models.checkpoint import load_config, load_model

SMALL = 200_000_000  # bytes of weights under which a step is timed in bursts
BURST = 8
Track = Callable[[Sequence[int]], Iterable[int]]


@dataclass(frozen=True)
class Loaded:
    """A model beside what its folder says of it."""

    path: Path
    model: Model
    config: dict[str, Any]
    file_bytes: int
    quantization: str = ""

    @staticmethod
    def of(path: Path, quantization: str = "", max_length: int | None = None) -> Loaded:
        options: dict[str, Any] = {"quantization": quantization} if quantization else {}
        model = load_model(path, max_length=max_length, **options)
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return Loaded(path, model, load_config(path), size, quantization)

    @property
    def burst(self) -> int:
        return BURST if self.file_bytes < SMALL else 1

    @property
    def weights_bytes(self) -> int:
        """What the products of one pass read."""
        size = 1 if self.quantization == "int8" else self.model.dtype.itemsize
        return size * sum(rows * columns for rows, columns in matrices(self.config))

    def open(self, length: int) -> Handle:
        """A sequence of ``length`` tokens, behind a source as long where there is an encoder."""
        tokens = self.prompt(length)
        return self.model.open(tokens, tokens if self.model.takes_source else ())

    def prompt(self, length: int) -> list[int]:
        """Any ``length`` tokens."""
        if length >= self.model.max_length:
            raise InvalidRequest(f"a context of {length} does not fit: {self.path.name} takes {self.model.max_length}")
        return [(7 * i) % (self.config["vocab_size"] - 1) + 1 for i in range(length)]


@dataclass(frozen=True)
class PassCost:
    """One pass over ``rows`` rows of each of ``batch`` sequences behind ``context`` tokens.

    floor: the bare products over as many rows, in the same run; None where there is no bare kernel to time.
    kv_bytes: keys and values that the pass reads beside ``weights_bytes`` of products.
    """

    rows: int
    context: int
    batch: int
    seconds: Spread
    floor: Spread | None
    kv_bytes: int
    weights_bytes: int

    @property
    def over_floor(self) -> float | None:
        return self.seconds.median / self.floor.median if self.floor else None

    @property
    def over_read(self) -> float | None:
        """Over weights and keys and values read at the bandwidth at which the floor reads its weights."""
        ratio = self.over_floor
        return ratio / (1 + self.kv_bytes / self.weights_bytes) if ratio else None


def pass_costs(
    loaded: Loaded, rows: Sequence[int], contexts: Sequence[int], turns: int = 20, batch: int = 1, track: Track = iter
) -> list[PassCost]:
    """Medians of ``turns`` interleaved passes through ``Model.score``, contexts held constant by rewinding."""
    model, config = loaded.model, loaded.config
    with ExitStack() as stack:
        tasks: dict[tuple[int, int], Task] = {}
        for context in contexts:
            handles = [loaded.open(context) for _ in range(batch)]
            for handle in handles:
                stack.callback(model.close, handle)
            tasks |= {(context, m): _scoring(model, handles, m, loaded.burst) for m in rows}
        for number, bare in enumerate(_bare(loaded), start=1):
            tasks |= {(-number, m): Task(partial(bare, m * batch), burst=loaded.burst) for m in rows}
        spreads = interleaved(tasks, turns, track)
    return [
        PassCost(
            rows=m,
            context=context,
            batch=batch,
            seconds=spreads[context, m],
            floor=min((spreads[at] for at in ((-1, m), (-2, m)) if at in spreads), key=_median, default=None),
            kv_bytes=batch * kv_bytes(config, context, model.dtype),
            weights_bytes=loaded.weights_bytes,
        )
        for context in contexts
        for m in rows
    ]


def _scoring(model: Model, handles: list[Any], rows: int, burst: int) -> Task:
    """The newest token's row and ``rows - 1`` drafted ones of each sequence, abandoned afterwards."""
    drafts = [Draft.chain(list(range(1, rows))) if rows > 1 else Draft.empty()] * len(handles)

    def run() -> None:
        model.score(handles, drafts)

    return Task(run, lambda: model.commit(handles, [()] * len(handles)), burst)


def _bare(loaded: Loaded) -> list[Callable[[int], float | None]]:
    """The bare products that there are: the compiled runner's own, and oneDNN's. The faster is the floor."""
    own = getattr(getattr(loaded.model, "runner", None), "floor", None)
    found: list[Callable[[int], float | None]] = [] if own is None else [own]
    if loaded.model.device.type == "cpu" and not loaded.quantization:
        found.append(Floor(matrices(loaded.config), loaded.model.dtype))
    return found


def _median(spread: Spread) -> float:
    return spread.median


@dataclass(frozen=True)
class StepCost:
    """One token of one sequence: our pass and transformers', behind the same context."""

    name: str
    context: int
    ours: Spread
    theirs: Spread

    @property
    def ratio(self) -> float:
        return self.ours.median / self.theirs.median


def step_cost(loaded: Loaded, context: int = 512, turns: int = 20, track: Track = iter) -> StepCost:
    """Interleaved with ``transformers`` in the same dtype, greedy decoding's pass without its ``generate``."""
    handle = loaded.open(context)
    try:
        ours = _scoring(loaded.model, [handle], 1, loaded.burst)
        theirs = _transformers_step(loaded, context)
        spreads = interleaved({"ours": ours, "theirs": theirs}, turns, track)
    finally:
        loaded.model.close(handle)
    return StepCost(loaded.path.name, context, spreads["ours"], spreads["theirs"])


def _transformers_step(loaded: Loaded, context: int) -> Task:
    from transformers import AutoModelForCausalLM, DynamicCache

    if loaded.model.takes_source:
        raise InvalidRequest(
            f"{loaded.path.name} is an encoder-decoder; its step is compared by benchmarks/encoder_decoder.py"
        )

    from foretoken.train.progress import quiet_transformers

    with quiet_transformers():
        module = AutoModelForCausalLM.from_pretrained(loaded.path, dtype=loaded.model.dtype).eval()
    tokens = torch.tensor([loaded.prompt(context)])
    cache = DynamicCache(config=module.config)
    with torch.inference_mode():
        module(tokens[:, :-1], past_key_values=cache, use_cache=True)

    @torch.inference_mode()
    def run() -> None:
        module(tokens[:, -1:], past_key_values=cache, use_cache=True)

    return Task(run, lambda: cache.crop(-1), loaded.burst)
