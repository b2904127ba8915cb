"""The type of numbers in the compiled runner's KV cache, and what a token takes of it (csrc/kv_cache.hpp)."""

from __future__ import annotations

import torch

from foretoken.core.errors import InvalidRequest
from foretoken.models.families.architecture import Architecture
from foretoken.models.runners.native.build import Kind
from foretoken.models.runners.native.packing import KINDS

SCALE = 4  # bytes of the scale of one head's keys or values in an int8 cache


def cache_kind(architecture: Architecture, dtype: torch.dtype, kv_cache_dtype: str) -> Kind:
    """Returns the type of keys and values.

    Args:
        architecture: the model.
        dtype: dtype of the computation.
        kv_cache_dtype: one of ``options.KV_CACHE_DTYPES``; "auto" is ``dtype``.

    Raises:
        InvalidRequest: the model has latent attention, and int8 is asked for.
    """
    refuse_int8_latents(architecture, kv_cache_dtype)
    return {"auto": KINDS[dtype], "bfloat16": Kind.BFLOAT16, "int8": Kind.INT8}[kv_cache_dtype]


def refuse_int8_latents(architecture: Architecture, kv_cache_dtype: str) -> None:
    """Raises InvalidRequest if the model has latent attention, and int8 is asked for."""
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
