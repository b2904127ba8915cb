"""Names of backends, dtypes, quantization schemes and weight formats.

Imports no torch, so that wrong names are refused early.
"""

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


_KNOWN = {
    "backend": BACKENDS,
    "quantization": QUANTIZATIONS,
    "weight_format": WEIGHT_FORMATS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
}


def check_dtype(name: str) -> None:
    """Raises InvalidRequest for a name that is neither in ``DTYPES`` nor "auto"."""
    if name != "auto" and name.removeprefix("torch.") not in DTYPES:
        raise InvalidRequest(f"dtype {name!r} is not known; expected auto, bfloat16, float16 or float32")


def check_options(**options: str | None) -> None:
    """Raises InvalidRequest for an unknown value of one of these options; ``quantization`` may be None."""
    for name, value in options.items():
        optional = name == "quantization"
        if value not in _KNOWN[name] and not (optional and value is None):
            known = f"{', '.join(_KNOWN[name])}{', or None for none' * optional}"
            raise InvalidRequest(f"{name} {value!r} is not known; known: {known}")


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
