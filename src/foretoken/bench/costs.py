"""Cost of a forward pass by rows and context, compared with its memory bandwidth limit and with transformers.

Costs of passes are kept for the machine: a checkpoint is measured once.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import foretoken
from foretoken.bench.measure import TimedTask, interleaved
from foretoken.bench.output import memory, processor
from foretoken.core.devices import wait_for
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, WriteError
from foretoken.costs.measured import CONTEXT, MeasuredCosts, PassCost, TimeSpread
from foretoken.models.base import Handle, Model
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.config import read
from foretoken.models.families.seq2seq import Seq2SeqArchitecture, supports
from foretoken.models.families.table import FAMILIES
from foretoken.models.formats.checkpoint import load_config, quiet_transformers
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.loading import load_model

SMALL = 200_000_000  # bytes of weights below which a step is timed in bursts
BURST = 8
ROWS, TURNS = (1, 2, 4, 6, 8, 12, 16), 5  # of costs that are kept
_FORMAT = 1  # of their file; another number measures again
Track = Callable[[Sequence[int]], Iterable[int]]


@dataclass(frozen=True)
class Loaded:
    """A model with its path and configuration."""

    path: Path
    model: Model
    config: dict[str, Any]
    file_bytes: int
    quantization: str = ""
    weight_format: str = "raw"

    @staticmethod
    def of(path: Path, quantization: str = "", weight_format: str = "raw", kv_cache_dtype: str = "auto") -> "Loaded":
        quantized = quantization or None
        model = load_model(path, quantization=quantized, weight_format=weight_format, kv_cache_dtype=kv_cache_dtype)
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return Loaded(path, model, load_config(path), size, quantization, weight_format)

    @property
    def burst(self) -> int:
        """Number of steps per turn of a timing: more than one for small models."""
        return BURST if self.file_bytes < SMALL else 1

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights that the matrix products of a pass over one row read."""
        if held := getattr(getattr(self.model, "runner", None), "product_bytes", 0):
            return int(held)
        scheme = Quantizer.of(self.quantization or None)
        bits = 8 * self.model.dtype.itemsize if scheme is None else scheme.weight_bits
        return int(bits / 8 * sum(rows * columns for rows, columns in matrices(self.config)))

    @property
    def identity(self) -> str:
        """Digest of all that a pass's time depends on: weights, types, threads, processor and version."""
        files, device = sorted(self.path.glob("*.safetensors")), self.model.device
        facts = [
            _FORMAT,
            foretoken.__version__,
            torch.__version__,
            str(self.path.resolve()),
            [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files],
            str(self.model.dtype),
            self.quantization,
            self.weight_format,
            self.model.kv_bytes_per_token,
            str(device),
            torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
            torch.get_num_threads(),
            type(getattr(self.model, "runner", self.model)).__name__,
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @property
    def fits_twice(self) -> bool:
        """Whether there is memory for a second copy of the weights, to measure the bandwidth limit."""
        return memory("MemAvailable") > 2 * self.file_bytes

    def open(self, length: int) -> Handle:
        """Opens a sequence of ``length`` tokens, with a source of the same length if there is an encoder."""
        tokens = self.prompt(length)
        return self.model.open(tokens, tokens if self.model.takes_source else ())

    def prompt(self, length: int) -> list[int]:
        """Returns ``length`` arbitrary token ids."""
        if length >= self.model.max_length:
            raise InvalidRequest(f"a context of {length} does not fit: {self.path.name} takes {self.model.max_length}")
        return [(7 * i) % (self.config["vocab_size"] - 1) + 1 for i in range(length)]


def pass_costs(
    loaded: Loaded, rows: Sequence[int], contexts: Sequence[int], turns: int = 20, batch: int = 1, track: Track = iter
) -> list[PassCost]:
    """Times ``turns`` interleaved passes through ``Model.score``. Rewinding keeps contexts constant."""
    model = loaded.model
    with ExitStack() as stack:
        tasks: dict[tuple[int, int], TimedTask] = {}
        for context in contexts:
            handles = [loaded.open(context) for _ in range(batch)]
            for handle in handles:
                stack.callback(model.close, handle)
            tasks |= {(context, m): scoring(model, handles, m, loaded.burst) for m in rows}
        for number, bare in enumerate(_bare(loaded), start=1):
            tasks |= {(-number, m): TimedTask(partial(bare, m * batch), burst=loaded.burst) for m in rows}
        spreads = interleaved(tasks, turns, track)
    return [
        PassCost(
            rows=m,
            context=context,
            batch=batch,
            seconds=spreads[context, m],
            floor=min(
                (spreads[at] for at in ((-1, m), (-2, m)) if at in spreads),
                key=lambda spread: spread.median,
                default=None,
            ),
            kv_bytes=batch * (1 + model.takes_source) * context * model.kv_bytes_per_token,
            weights_bytes=loaded.weights_bytes,
        )
        for context in contexts
        for m in rows
    ]


def known(loaded: Loaded) -> MeasuredCosts:
    """Returns the saved costs of this checkpoint on this machine."""
    return MeasuredCosts.load(loaded.path.name, loaded.identity)


def measured(
    loaded: Loaded,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = (CONTEXT,),  # tokens before the rows
    batches: Sequence[int] = (1,),  # sequences that share a pass
    turns: int = TURNS,  # passes of each kind
) -> MeasuredCosts:
    """Returns the saved costs of passes over ``rows`` of a checkpoint; missing ones are measured and saved."""
    costs = known(loaded)
    lacking = list(costs.lacks(rows, contexts, batches))
    if lacking:
        passes = (pass_costs(loaded, rows, [context], turns, batch) for context, batch in lacking)
        costs = costs.merged([cost for some in passes for cost in some])
        with suppress(WriteError):  # measured all the same
            costs.save()
    return costs


def scoring(model: Model, handles: list[Any], rows: int, burst: int = 1) -> TimedTask:
    """Scores the newest token and ``rows - 1`` draft tokens of each sequence, then rewinds."""
    drafts = [chain(rows)] * len(handles)

    def run() -> None:
        model.score(handles, drafts)
        wait_for(model.device)

    return TimedTask(run, lambda: model.commit(handles, [()] * len(handles)), burst)


def chain(rows: int) -> Draft:
    """Returns an arbitrary draft whose pass has ``rows`` rows."""
    return Draft.chain(list(range(1, rows))) if rows > 1 else Draft.empty()


def _bare(loaded: Loaded) -> list[Callable[[int], float | None]]:
    """Returns the available bare products, the compiled runner's and oneDNN's, of which the faster bounds a pass."""
    own = getattr(getattr(loaded.model, "runner", None), "floor", None)
    products: list[Callable[[int], float | None]] = [] if own is None else [own]
    if loaded.model.device.type == "cpu" and not loaded.quantization and not loaded.model.has_experts:
        products.append(Floor(matrices(loaded.config), loaded.model.dtype))
    return products


@dataclass(frozen=True)
class StepCost:
    """Cost of decoding one token of one sequence in Foretoken and in transformers, after the same context."""

    name: str
    context: int
    foretoken: TimeSpread
    transformers: TimeSpread

    @property
    def ratio(self) -> float:
        """Seconds of Foretoken over those of transformers."""
        return self.foretoken.median / self.transformers.median


def step_cost(loaded: Loaded, context: int = 512, turns: int = 20, track: Track = iter) -> StepCost:
    """Times a pass interleaved with transformers' forward pass (without ``generate``) in the same dtype."""
    handle = loaded.open(context)
    try:
        tasks = {
            "foretoken": scoring(loaded.model, [handle], 1, loaded.burst),
            "transformers": _transformers_step(loaded, context),
        }
        spreads = interleaved(tasks, turns, track)
    finally:
        loaded.model.close(handle)
    return StepCost(loaded.path.name, context, spreads["foretoken"], spreads["transformers"])


def _transformers_step(loaded: Loaded, context: int) -> TimedTask:
    from transformers import AutoModelForCausalLM, DynamicCache

    if loaded.model.takes_source:
        raise InvalidRequest(
            f"{loaded.path.name} is an encoder-decoder; its speed is compared by bench race --prompts repairs"
        )

    from foretoken.quantize.run import checkpoint_folder

    with quiet_transformers():
        module = AutoModelForCausalLM.from_pretrained(checkpoint_folder(loaded.path), dtype=loaded.model.dtype).eval()
    tokens = torch.tensor([loaded.prompt(context)])
    cache = DynamicCache(config=module.config)
    with torch.inference_mode():
        module(tokens[:, :-1], past_key_values=cache, use_cache=True)

    @torch.inference_mode()
    def run() -> None:
        module(tokens[:, -1:], past_key_values=cache, use_cache=True)

    return TimedTask(run, lambda: cache.crop(-1), loaded.burst)


Shape = tuple[int, int]  # [out, in]


def matrices(config: Mapping[str, Any]) -> list[Shape]:
    """Returns the matrix shapes of one pass of a dense model, with QKV fused and gate and up fused.

    For an encoder-decoder these are the decoder's; the KV cache of the source is computed once, not in every pass.
    """
    if supports(config):
        return _of_decoder(Seq2SeqArchitecture.of(config).decoder)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None:
        config = read(config)[1]  # by Llama's names
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    gated = family is None or family.gated
    layer = [
        ((heads + 2 * kv_heads) * size, hidden),
        (hidden, heads * size),
        ((1 + gated) * config["intermediate_size"], hidden),
        (hidden, config["intermediate_size"]),
    ]
    return layer * config["num_hidden_layers"] + [(config["vocab_size"], hidden)]


def _of_decoder(a: Architecture) -> list[Shape]:
    wide = a.heads * a.head_dim
    layer = [
        (3 * wide, a.hidden),
        (a.hidden, wide),
        (wide, a.hidden),
        (a.hidden, wide),
        (len(a.names.up) * a.intermediate, a.hidden),
        (a.hidden, a.intermediate),
    ]
    return layer * a.layers + [(a.vocab, a.hidden)]


class Floor:
    """Weights of these shapes, packed for oneDNN where supported, in separate memory. Their values do not matter."""

    def __init__(self, shapes: list[Shape], dtype: torch.dtype) -> None:
        self._packed = dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        self._dtype = dtype
        self._weights = [(shape, self._weight(shape)) for shape in shapes]
        self._inputs: dict[tuple[int, int], Tensor] = {}

    def _weight(self, shape: Shape) -> Tensor:
        plain = torch.full(shape, 0.01, dtype=self._dtype)
        return torch.ops.mkldnn._reorder_linear_weight(plain) if self._packed else plain

    @torch.inference_mode()
    def __call__(self, rows: int) -> None:
        """Computes every product once over ``rows`` rows."""
        for (_, width), weight in self._weights:
            x = self._inputs.get((rows, width))
            if x is None:
                x = self._inputs[rows, width] = torch.full((rows, width), 0.01, dtype=self._dtype)
            if self._packed:
                torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            else:
                torch.nn.functional.linear(x, weight)
