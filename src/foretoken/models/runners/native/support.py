"""Models, types of the KV cache (csrc/kv_cache.hpp) and weight formats (csrc/packed.hpp) that the kernels support."""

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from foretoken.core.errors import InvalidRequest
from foretoken.core.native import cpu
from foretoken.core.native.build import KernelsUnavailable
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.latent import LatentAttention
from foretoken.models.families.layers import Layer
from foretoken.models.runners.native.bindings import LANES, MAX_HEAD, MAX_LATENT, UNIT, ModelSpec
from foretoken.models.runners.native.build import Kind
from foretoken.models.runners.native.packing import KINDS, discard
from foretoken.models.state.pages import PAGE, Pages


def check_supported(architecture: Architecture, dtype: torch.dtype, features: bool) -> None:
    """Raises KernelsUnavailable for a dtype or sizes that the kernels do not support.

    features: whether the model takes features.
    """
    a = architecture
    if dtype not in (torch.float32, torch.bfloat16):
        raise KernelsUnavailable(f"the kernels compute float32 and bfloat16, not {dtype}")
    if a.latent is not None:
        _check_latent(a.latent)
    else:
        _check_heads(a)
    if features and a.hidden % UNIT:
        raise KernelsUnavailable(f"the kernels take features of a multiple of {UNIT} numbers, not {a.hidden}")
    if a.layer_inputs is not None and a.layer_inputs.width % LANES:
        raise KernelsUnavailable(
            f"the kernels need inputs of layers of a multiple of {LANES} numbers, not {a.layer_inputs.width}"
        )
    r = a.recurrence
    if r is not None and any(size % LANES for size in (r.channels, r.out, r.key_dim, r.value_dim)):
        raise KernelsUnavailable(
            f"the kernels need recurrent heads and channels of multiples of {LANES}, not {r.key_dim}, "
            f"{r.value_dim}, {r.channels} and {r.out}"
        )


def _check_heads(a: Architecture) -> None:
    for dim in {a.sizes(layer).head_dim for layer in a.stack if layer.attention}:
        if dim % LANES or dim > MAX_HEAD:
            raise KernelsUnavailable(
                f"the kernels need heads of a multiple of {LANES} and at most {MAX_HEAD}, not {dim}"
            )


def _check_latent(s: LatentAttention) -> None:
    parts = {"kv_lora_rank": (s.rank, UNIT), "v_head_dim": (s.value, UNIT), "qk_rope_head_dim": (s.rotated, LANES)}
    parts |= {"qk_nope_head_dim": (s.plain, LANES), "q_lora_rank": (s.query_rank, LANES)}
    for name, (size, unit) in parts.items():
        if size % unit:
            raise KernelsUnavailable(f"the kernels need {name} to be a multiple of {unit}, not {size}")
    if s.rank + s.rotated > MAX_LATENT:
        raise KernelsUnavailable(f"the kernels need keys of at most {MAX_LATENT} numbers, not {s.rank + s.rotated}")


SCALE = 4  # bytes of the scale of one head's keys or values in an int8 cache


def cache_kind(architecture: Architecture, dtype: torch.dtype, kv_cache_dtype: str) -> Kind:
    """Returns the type of keys and values.

    Raises InvalidRequest if int8 is requested for latent attention.
    kv_cache_dtype: one of ``options.KV_CACHE_DTYPES``; "auto" is ``dtype``.
    """
    refuse_int8_latents(architecture, kv_cache_dtype)
    return {"auto": KINDS[dtype], "bfloat16": Kind.BFLOAT16, "int8": Kind.INT8}[kv_cache_dtype]


def refuse_int8_latents(architecture: Architecture, kv_cache_dtype: str) -> None:
    if kv_cache_dtype == "int8" and architecture.latent is not None:
        raise InvalidRequest(
            f"kv_cache_dtype='int8' is for keys and values of heads; a {architecture.family} caches one compressed "
            "latent for all heads, which takes less memory already; leave kv_cache_dtype out"
        )


def token_bytes(architecture: Architecture, kind: Kind) -> int:
    """Returns the bytes of one token's keys and values in all layers."""
    if kind == Kind.INT8:
        return architecture.kv_numbers + architecture.kv_scales * SCALE
    return architecture.kv_numbers * (4 if kind == Kind.FLOAT32 else 2)


def new_pages(allocate: Callable[[int], int], token: int, spec: ModelSpec, kind: Kind) -> Pages:
    """Returns the pages of a model's KV cache, which discard keys and values beyond the windows of layers.

    Args:
        token: bytes of one token in all layers.
        kind: type of keys and values.
    """
    itemsize, scale = {Kind.FLOAT32: (4, 0), Kind.BFLOAT16: (2, 0), Kind.INT8: (1, SCALE)}[kind]
    windows: dict[tuple[int, int], int] = {}  # by start and size of a layer in a page; 0: some layer reads all of it
    for layer in spec.layers[: spec.layer_count]:
        a = layer.attention
        if layer.attends and not spec.latent.rank:
            start, size = a.cache_at * itemsize + a.scales_at * scale, 2 * a.kv_heads * (a.head_dim * itemsize + scale)
            place, window = (PAGE * start, PAGE * size), abs(a.window)
            windows[place] = max(window, windows.get(place, window)) if window and windows.get(place, window) else 0
    bounded = [place for place, window in windows.items() if window]

    def discard_bounded(page: int) -> None:
        for start, size in bounded:
            discard(page + start, size)

    return Pages(
        allocate, PAGE * token, window=max(windows.values(), default=0), discard=discard_bounded if bounded else None
    )


CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
LEVELS = ("avx512-bf16",)  # on which restoring weights costs less than reading them
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


PACKED_BITS = 13.0  # bits of a weight in 12 bits, with at most 1 for steps with a rare exponent and tables


def packs(architecture: Architecture, dtype: torch.dtype, weight_format: str) -> bool:
    """Returns whether the compiled kernels store matrices of this dtype in 12 bits.

    weight_format: one of ``options.WEIGHT_FORMATS``.
    """
    if dtype != torch.bfloat16:
        return False
    return weight_format == "packed" or (weight_format == "auto" and packing_is_faster(architecture, dtype))


def packing_is_faster(architecture: Architecture, dtype: torch.dtype) -> bool:
    """Returns whether passes of few rows are faster with weights in 12 bits: they are memory-bound.

    Measured on two cores of a Zen 4 with a last-level cache of 32 MiB, products of one matrix in turns, raw time over
    packed at 1, 4 and 8 rows: 29 MB 1.43, 1.30, 1.10; 59 MB 1.48, 1.39, 1.27; 118 MB 1.54, 1.50, 1.34.
    Not measured on processors with AMX, which multiply raw weights much faster.
    """
    level = cpu.chosen()
    if dtype != torch.bfloat16 or level is None or level.name not in LEVELS:
        return False
    return matrix_bytes(architecture, dtype) >= last_level_cache()


def matrix_bytes(a: Architecture, dtype: torch.dtype) -> int:
    """Returns the bytes of the matrices that a pass over one row reads, as they are stored raw."""
    numbers = [a.sizes(layer).head_dim * 2 * (a.heads + a.sizes(layer).kv_heads) for layer in a.stack]
    attention = sum(numbers) * a.hidden
    if a.latent is not None:
        s = a.latent
        queries = (
            s.query_rank * (a.hidden + a.heads * (s.plain + s.rotated)) or a.heads * (s.plain + s.rotated) * a.hidden
        )
        per_head = s.rank * (s.plain + s.value) + s.value * a.hidden
        attention = a.layers * (queries + (s.rank + s.rotated) * a.hidden + a.heads * per_head)
    mlps = sum(_mlp_width(a, layer) for layer in a.stack) * a.hidden
    return (attention + mlps + a.vocab * a.hidden) * dtype.itemsize


def _mlp_width(a: Architecture, layer: Layer) -> int:
    """Returns the rows of gate, up and the transposed down that one row reads."""
    if layer.experts is not None:
        beside = 0 if layer.experts.beside is None else a.intermediate
        return 3 * (layer.experts.chosen * layer.experts.intermediate + layer.experts.shared + beside)
    return (3 if layer.mlp == "gated" else 2) * (layer.inner or a.intermediate)


@functools.cache
def last_level_cache() -> int:
    """Returns the bytes of the largest cache; 32 MiB if it is unknown."""
    sizes = []
    for file in CACHES.glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        if text[:-1].isdigit() and text[-1] in _UNITS:
            sizes.append(int(text[:-1]) * _UNITS[text[-1]])
    return max(sizes, default=32 * 2**20)
