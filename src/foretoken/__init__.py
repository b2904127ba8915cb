"""Exact speculative decoding for Hugging Face models."""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.core.errors import ForetokenError
    from foretoken.interop import custom_generate
    from foretoken.llm import LLM
    from foretoken.outputs import CompletionOutput, RequestOutput, SpeculationStats, StreamPiece
    from foretoken.params import LoRARequest, SamplingParams
    from foretoken.speculation import SpeculativeConfig

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "ForetokenError",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "SpeculationStats",
    "SpeculativeConfig",
    "StreamPiece",
    "__version__",
    "custom_generate",
]

# Names are imported on first use, so that the command line prints its help without importing torch.
_HOMES = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "ForetokenError": "core.errors",
    "LoRARequest": "params",
    "RequestOutput": "outputs",
    "SamplingParams": "params",
    "SpeculationStats": "outputs",
    "SpeculativeConfig": "speculation",
    "StreamPiece": "outputs",
    "custom_generate": "interop",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
    collects = gc.isenabled()
    gc.disable()  # the garbage collector makes the import of torch a fifth longer, and finds almost nothing
    try:
        return getattr(import_module(f"foretoken.{_HOMES[name]}"), name)
    finally:
        if collects:
            gc.enable()
