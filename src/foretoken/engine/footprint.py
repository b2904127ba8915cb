"""Memory of a target and its drafters: summed from their files, and compared with the free memory before loading.

The sum has the weights, the KV caches and recurrent states, and other memory: of passes, positions, hidden states that
heads read, and the tokenizer. ``benchmarks/footprint.py`` compares it with measurements. KV caches are counted for
``kv_cache_memory_bytes``, else for one sequence: of ``max_model_len`` tokens if that is given, else of at most 2,048.
The memory of KV caches is divided between target and proposer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foretoken.core.artifacts import HEADS_FOLDER
from foretoken.core.errors import ForetokenError, InvalidRequest, ModelLoadError, allocation_failed, reason_of
from foretoken.models.base import Model
from foretoken.models.families.architecture import Architecture, supports
from foretoken.models.formats.checkpoint import load_config, open_weights, resolve
from foretoken.models.formats.memory import free_memory, weight_bytes
from foretoken.models.heads.files import find_head
from foretoken.models.heads.published import MTP, default_drafters
from foretoken.models.loading import OpenedModel, open_model, resolve_device, resolve_dtype
from foretoken.models.options import check_options
from foretoken.models.runners.native.support import cache_kind, token_bytes
from foretoken.models.state.recurrent import StateShape
from foretoken.propose.base import Proposer
from foretoken.speculation import SpeculativeConfig, find

USUAL_TOKENS = 2048  # of a sequence whose maximum length is the checkpoint's
PROMPT_ROWS = 2048  # prompt tokens of a step whose hidden states a drafter reads
_PASS_ROWS = 512  # rows of the largest pass
_LOGITS = 16  # rows of logits
_TOKENIZER = 300  # bytes of a token in the tokenizer, measured at 49,152 and 262,144 tokens
_PIECES = 1700  # bytes of a token while both vocabularies of the method "vocabulary" are read
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a model."""

    name: str  # its folder or file
    role: str  # "target", or the method that drafts with it
    weights: int  # bytes of its weights
    kv_per_token: int = 0  # bytes of its KV cache for a token; 0 if unknown
    state: int = 0  # bytes of a sequence's recurrent state
    kv_windowed: int = 0  # the fraction of ``kv_per_token`` of layers with attention windows
    window: int = 0  # longest of these windows in tokens
    scratch: int = 0  # bytes of intermediate results and of the tokenizer
    embedding: int = 0  # bytes of its embedding, which drafters may share
    max_length: int = 0  # the checkpoint's maximum length of a sequence in tokens; 0 if unknown
    vocab: int = 0  # number of its tokens; 0 if unknown

    def kv_bytes(self, tokens: int) -> int:
        """Returns the bytes of the KV cache and the recurrent state of one sequence."""
        held = min(tokens, self.window + _PASS_ROWS)  # what is out of reach is returned after each pass
        return tokens * (self.kv_per_token - self.kv_windowed) + held * self.kv_windowed + self.state


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Arguments of ``LLM`` that the memory depends on."""

    dtype: Any = "auto"
    device: Any = "auto"
    backend: str = "auto"
    quantization: str | None = None
    weight_format: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    kv_cache_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of all models of an ``LLM`` on one device."""

    models: tuple[Footprint, ...]  # the target, then the drafters
    device: torch.device
    tokens: int | None  # tokens of the KV caches; None if ``kv_bytes`` was given
    kv_bytes: int  # bytes of all KV caches and recurrent states
    free: int | None  # free bytes on the device; None if the system does not report them

    @property
    def total(self) -> int:
        return sum(model.weights + model.scratch for model in self.models) + self.kv_bytes

    @property
    def fits(self) -> bool:
        """Whether the free memory suffices, as far as it is known."""
        return self.free is None or self.total <= self.free

    @property
    def tokens_that_fit(self) -> int | None:
        """Tokens of all sequences together whose KV cache fits; None if unknown."""
        each = sum(model.kv_per_token for model in self.models)
        if self.free is None or not each:
            return None
        return max(0, (self.free - self.total + self.kv_bytes - sum(model.state for model in self.models)) // each)

    def describe(self) -> dict[str, Any]:
        """Returns the plan as a JSON document, in bytes."""
        models = [{name: getattr(model, name) for name in Footprint.__slots__} for model in self.models]
        numbers = {"kv_cache": self.kv_bytes, "total": self.total, "free": self.free}
        more = {"kv_cache_tokens": self.tokens, "tokens_that_fit": self.tokens_that_fit, "fits": self.fits}
        return {"device": str(self.device), "models": models, **numbers, **more}


def plan_memory(
    path: Path, config: SpeculativeConfig, options: MemoryOptions, methods: Sequence[str | Mapping[str, Any]] = ()
) -> MemoryPlan:
    """Returns the memory of a target and its drafters without reading their weights.

    Args:
        path: the target's folder or GGUF file.
        config: the way to speculate.
        options: the arguments of ``LLM``.
        methods: further methods, as ``LLM`` takes them.

    Raises:
        InvalidRequest: an option is not valid.
        ModelLoadError: the target's configuration is damaged.
    """
    check_options(kv_cache_dtype=options.kv_cache_dtype)
    target = _opened(path, "target", options, options.quantization, options.kv_cache_dtype)
    device = resolve_device(options.device)
    configs = [config, *(SpeculativeConfig.of({"method": m} if isinstance(m, str) else m) for m in methods)]
    drafters = []
    for each in configs:
        for method, draft, quantization in _drafters(each, path):
            try:
                drafters.append(_drafter(method, draft, quantization, target, options))
            except ForetokenError:  # loading reports it, or skips the drafter
                continue
    models = (target, *drafters)
    tokens = min(target.max_length or USUAL_TOKENS, options.max_model_len or USUAL_TOKENS)
    limit = options.kv_cache_memory_bytes
    kv_bytes = sum(model.kv_bytes(tokens) for model in models) if limit is None else limit
    return MemoryPlan(models, device, None if limit else tokens, kv_bytes, free_memory(device))


@contextmanager
def memory_checked(
    path: Path, config: SpeculativeConfig, options: MemoryOptions, methods: Sequence[str | Mapping[str, Any]] = ()
) -> Iterator[None]:
    """Checks ``plan_memory`` before the block, which loads the models.

    Raises:
        ModelLoadError: the sum exceeds the free memory, and the message names an option that fits; or an allocation
            of the block failed.
    """
    plan = plan_memory(path, config, options, methods)
    free = (plan.free or 0) / _GIB
    if not plan.fits:
        advice = _advice(path, config, options, methods, plan)
        raise ModelLoadError(f"{_needed(path, plan)}, but {free:.1f} GiB are free on {plan.device}; {advice}")
    try:
        yield
    except Exception as error:
        if not allocation_failed(error):
            raise
        before = f"{free:.1f} GiB were free on {plan.device}"
        raise ModelLoadError(
            f"memory ran out ({reason_of(error)}): {_needed(path, plan)}, and {before}; free memory, raise its limit, "
            "or take quantization='int8' or a smaller model"
        ) from error


def _needed(path: Path, plan: MemoryPlan) -> str:
    parts = [f"{model.weights / _GIB:.1f} for the weights of {model.name} ({model.role})" for model in plan.models]
    tokens = "" if plan.tokens is None else f" of {plan.tokens} tokens"
    parts += [f"{plan.kv_bytes / _GIB:.1f} for the KV cache{tokens}"]
    parts += [f"{sum(model.scratch for model in plan.models) / _GIB:.1f} for passes"]
    return f"{path} needs {plan.total / _GIB:.1f} GiB ({', '.join(parts)})"


def _advice(
    path: Path,
    config: SpeculativeConfig,
    options: MemoryOptions,
    methods: Sequence[str | Mapping[str, Any]],
    plan: MemoryPlan,
) -> str:
    tokens = (plan.tokens_that_fit or 0) // 256 * 256
    changes: dict[str, MemoryOptions] = {}
    if tokens >= USUAL_TOKENS and options.kv_cache_memory_bytes is None:
        changes[f"max_model_len={tokens}"] = replace(options, max_model_len=tokens)
    if tokens >= USUAL_TOKENS and options.kv_cache_memory_bytes is not None:
        size = tokens * sum(model.kv_per_token for model in plan.models)
        changes[f"kv_cache_memory_bytes={size}"] = replace(options, kv_cache_memory_bytes=size)
    if options.kv_cache_dtype == "auto" and options.kv_cache_memory_bytes is None:
        changes["kv_cache_dtype='int8'"] = replace(options, kv_cache_dtype="int8")
    for scheme in ("int8", "int4") if options.quantization is None else ():
        changes[f"quantization={scheme!r}"] = replace(options, quantization=scheme, weight_format="auto")
    for name, changed in changes.items():
        try:
            other = plan_memory(path, config, changed, methods)
        except ForetokenError:
            continue
        if other.fits:
            return f"{name} fits, with {other.total / _GIB:.1f} GiB"
    plain = plan_memory(path, SpeculativeConfig(method="none"), options)
    if plain.fits:
        return f"without a drafter it fits, with {plain.total / _GIB:.1f} GiB"
    return "take a smaller dtype, quantization='int8', a smaller model, or another machine"


def _opened(path: Path, role: str, options: MemoryOptions, quantization: str | None, kv_cache_dtype: str) -> Footprint:
    opened = open_model(
        path, options.dtype, options.device, options.backend, quantization, weight_format=options.weight_format
    )
    a = _architecture(opened, options.max_model_len)
    if a is None:
        return Footprint(str(path), role, opened.weight_bytes)
    wide = torch.float32 if opened.dtype.itemsize == 4 else torch.bfloat16  # float16 takes as much
    kind = cache_kind(a, wide, kv_cache_dtype)
    kv, windows = token_bytes(a, kind), [abs(layer.window) for layer in a.stack]
    windowed = replace(a, stack=tuple(layer for layer in a.stack if layer.window)) if a.latent is None else None
    kv_windowed = 0 if windowed is None else token_bytes(windowed, kind)
    state = 0 if a.recurrence is None else StateShape.of(a.recurrence, a.recurrent_layers).bytes
    embedding = a.vocab * a.hidden * opened.dtype.itemsize
    tokenizer = _TOKENIZER * a.vocab if role in ("target", "vocabulary") else 0
    scratch = _scratch(a, min(a.max_length, options.max_model_len or USUAL_TOKENS)) + tokenizer
    if quantization is not None:  # while a layer's widest matrices, of MLPs, are quantized
        scratch = max(scratch, 8 * a.hidden * a.intermediate)
    window = max(windows, default=0)
    sizes = kv, state, kv_windowed, window, scratch, embedding, a.max_length, a.vocab
    return Footprint(str(path), role, opened.weight_bytes, *sizes)


def _architecture(opened: OpenedModel, max_length: int | None) -> Architecture | None:
    """Returns the decoder's architecture; None if only transformers knows it."""
    if opened.runtime is not None:
        return opened.runtime.decoder_of(opened.config)
    try:
        return Architecture.of(opened.config, max_length) if supports(opened.config) else None
    except ForetokenError:
        return None


def _scratch(a: Architecture, tokens: int) -> int:
    """Returns the bytes of a pass's intermediate results, of the logits of a few rows, and of rotary tables.

    Intermediate results are the residual stream, its change, queries, keys and values in float32, queries in bfloat16,
    and four inputs of products as wide as the widest, in bfloat16.
    """
    queries = a.heads * a.head_dim
    widest = max(a.intermediate, queries, a.hidden)
    row = 8 * a.hidden + 4 * (queries + 2 * a.kv_heads * a.head_dim) + 2 * queries + 8 * widest
    tables = 10 * sum(map(len, a.frequencies))  # bytes of a position, with a quarter in advance
    return _PASS_ROWS * row + 4 * _LOGITS * a.vocab + tokens * tables


def _drafters(config: SpeculativeConfig, target: Path) -> Iterator[tuple[str, Path, str | None]]:
    """Yields method, path and quantization of the models that a configuration drafts with."""
    name, method, keys = config.method_in_force, find(config.method_in_force), config.own()
    if method is None:
        return
    if name == "self_quantized":
        yield name, target, keys.quantization
    for member in [*getattr(keys, "members", ()), *filter(None, [getattr(keys, "member", None)])]:
        yield from _drafters(SpeculativeConfig.of(member), target)
    if config.model is not None:
        if method.takes_draft_model:
            yield name, resolve(config.model), None
    elif method.takes_draft_model and name not in ("auto", "draft_model", "early_exit", "vocabulary"):
        yield name, _heads(name, None, target), None
    elif config.method is None:
        for default in default_drafters(target)[:1]:
            yield default.method, _heads(default.method, default.model, target), None


def _heads(method: str, model: str | None, target: Path) -> Path:
    """Returns the folder of heads; the target for layers of its checkpoint."""
    layers = method == MTP and model is None and not (target / HEADS_FOLDER / MTP).is_dir()
    return target if layers else find_head(method, model, target)


def _drafter(method: str, path: Path, quantization: str | None, target: Footprint, options: MemoryOptions) -> Footprint:
    """Returns the memory of a drafter: a whole model, or heads, which are read in the target's dtype."""
    config = load_config(path)
    if method == "self_quantized":
        copy = _opened(path, method, replace(options, weight_format="raw"), quantization, "auto")
        kv = copy.kv_per_token if copy.state else 0
        return replace(copy, weights=copy.weights - copy.embedding, kv_per_token=kv, kv_windowed=0, scratch=0)
    if "vocab_size" in config and method in ("auto", "draft_model", "vocabulary", "mixture"):
        try:
            model = _opened(path, method, replace(options, max_model_len=None), None, "auto")
            pieces = _PIECES * (model.vocab + target.vocab) if method == "vocabulary" else 0
            return replace(model, scratch=model.scratch + pieces)
        except ForetokenError:
            pass  # heads
    if path == Path(target.name):
        return Footprint(str(path), method, 0)  # layers of the checkpoint, counted with it
    query_heads = _size(config, "num_attention_heads")
    heads = _size(config, "num_key_value_heads") or query_heads
    width = _size(config, "head_dim") or _size(config, "hidden_size") // max(1, query_heads)
    dtype = resolve_dtype(options.dtype, resolve_device(options.device), compiled=True)
    kv = 2 * max(1, _size(config, "num_hidden_layers")) * heads * width * dtype.itemsize
    shapes = open_weights(path).shapes
    copied = 0 if any("embed" in name for name in shapes) or not kv else target.embedding
    fusion = shapes.get("fc.weight", (0, _size(config, "hidden_size")))  # held twice, and not quantized
    states = 12 * PROMPT_ROWS * fusion[-1]  # hidden states of the target, twice in float32, and what is made from them
    bits = 8 if kv and dtype.itemsize == 2 else None  # at most; see ``head_quantizer``
    weights = weight_bytes(shapes, dtype, bits) + math.prod(fusion) * dtype.itemsize + copied
    return Footprint(str(path), method, weights, kv, scratch=states)


def _size(config: Mapping[str, Any], name: str) -> int:
    """Returns a size in a head's config.json; 0 without it. Loading the head checks its type."""
    value = config.get(name)
    return value if isinstance(value, int) else 0


_PREFIX_SHARE = 0.25  # of free memory, the limit of the prefix cache


def state_tokens(target: Model, proposer: Proposer) -> int:
    """Returns the number of tokens whose KV cache takes as much memory as the recurrent states of one sequence."""
    each, state = target.kv_bytes_per_token + proposer.kv_bytes_per_token, target.state_bytes + proposer.state_bytes
    return -(-state // each) if each else 0


def split_kv_memory(
    target: Model, proposer: Proposer, max_bytes: int | None, prefixes: bool, max_sequences: int
) -> int | None:
    """Enables the prefix caches and returns the number of tokens whose KV cache fits, None for no limit.

    Args:
        max_bytes: KV cache memory of both together, or None for no limit.
        prefixes: Whether to enable prefix caching.
        max_sequences: Number of sequences in one forward pass.

    Raises:
        InvalidRequest: Not even one sequence of the model's length fits.
    """
    each = target.kv_bytes_per_token + proposer.kv_bytes_per_token
    capacity = None
    if max_bytes is not None:
        if not target.kv_bytes_per_token:
            raise InvalidRequest("kv_cache_memory_bytes cannot bound this model, whose KV cache has no known size")
        capacity = max_bytes // each
        if capacity - (state := state_tokens(target, proposer)) <= target.max_length:
            raise InvalidRequest(
                f"kv_cache_memory_bytes of {max_bytes / 2**20:.0f} MiB holds {max(0, capacity - state)} tokens and a "
                f"sequence may have {target.max_length}; give it "
                f"{(target.max_length + state + 128) * each / 2**20:.0f} MiB, or lower "
                "max_model_len"
            )
    if prefixes and each:
        limit = max_bytes
        if limit is None:
            limit = min(
                max_sequences * (target.max_length + state_tokens(target, proposer)) * each,
                int(_PREFIX_SHARE * (free_memory(target.device) or 0)),
            )
        target.enable_prefix_cache(limit * target.kv_bytes_per_token // each)
        proposer.enable_prefix_cache(limit * proposer.kv_bytes_per_token // each)
    return capacity
