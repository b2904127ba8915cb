"""Decides whether bfloat16 weights are stored in 12 bits (csrc/packed.hpp)."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from foretoken.core.native import cpu
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.layers import Layer

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
