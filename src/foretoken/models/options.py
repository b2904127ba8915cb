"""Names of backends, dtypes, quantization schemes and weight formats.

Imports no torch, so that wrong names are refused early.
"""

from __future__ import annotations

from collections.abc import Collection

from foretoken.core.errors import InvalidRequest

BACKENDS = ("auto", "native", "hf")
QUANTIZATIONS = ("int8", "int4", "int4-g32", "int4-g64", "int4-g128")
WEIGHT_FORMATS = ("auto", "raw", "packed")
KV_CACHE_DTYPES = ("auto", "bfloat16", "int8")
DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "fp16": "float16",
}
"""torch's name of each dtype name that users may write."""


def check_backend(name: str) -> None:
    """Raises InvalidRequest for an unknown backend."""
    if name not in BACKENDS:
        raise InvalidRequest(f"backend {name!r} is not known; known: {', '.join(BACKENDS)}")


def check_dtype(name: str) -> None:
    """Raises InvalidRequest for a name that is neither in ``DTYPES`` nor "auto"."""
    if name != "auto" and name.removeprefix("torch.") not in DTYPES:
        raise InvalidRequest(f"dtype {name!r} is not known; expected auto, bfloat16, float16 or float32")


def check_quantization(name: str | None) -> None:
    """Raises InvalidRequest for an unknown scheme of quantization."""
    if name is not None and name not in QUANTIZATIONS:
        raise InvalidRequest(f"quantization {name!r} is not known; known: {', '.join(QUANTIZATIONS)}, or None for none")


def check_weight_format(name: str) -> None:
    """Raises InvalidRequest for an unknown format of weights in memory."""
    if name not in WEIGHT_FORMATS:
        raise InvalidRequest(f"weight_format {name!r} is not known; known: {', '.join(WEIGHT_FORMATS)}")


def check_kv_cache_dtype(name: str) -> None:
    """Raises InvalidRequest for an unknown type of the KV cache."""
    if name not in KV_CACHE_DTYPES:
        raise InvalidRequest(f"kv_cache_dtype {name!r} is not known; known: {', '.join(KV_CACHE_DTYPES)}")


def check_adapters(names: Collection[str], backend: str, tensor_parallel_size: int) -> None:
    """Raises InvalidRequest for LoRA adapters with options that leave the compiled runtime."""
    if names and (backend == "hf" or tensor_parallel_size > 1):
        raise InvalidRequest(
            "LoRA adapters are computed by the compiled runtime, in one process: omit backend='hf' and "
            "tensor_parallel_size, or merge the adapter into the model with PEFT's merge_and_unload"
        )


def drafts_format(target: str) -> str:
    """Returns the weight format of draft models. "packed" is for the target; drafts then follow "auto"."""
    return "raw" if target == "raw" else "auto"
