"""Checks of checkpoints that transformers loads: sizes before the module is allocated, parameters afterwards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from foretoken.core.errors import ModelLoadError
from foretoken.models.formats.checkpoint import open_weights
from foretoken.models.formats.finite import is_finite
from foretoken.models.formats.memory import check_fits

MAX_GROWTH = 2  # parameters of the module per number in the checkpoint; conversions on loading change the number
SLACK = 2**16  # parameters by which small modules may exceed that
MAX_REASON = 300  # characters


def check_size(config: Any, path: Path) -> None:
    """Builds the module without memory, and compares its size with the checkpoint's.

    Args:
        config: the configuration as transformers reads it.
        path: the checkpoint's folder.

    Raises:
        ModelLoadError: the module is much larger than its tensors, or its tables do not fit into memory.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    built = sum(parameter.numel() for parameter in module.parameters())
    stored = sum(math.prod(shape) for shape in open_weights(path).shapes.values())
    packed = getattr(config, "quantization_config", None) is not None
    if not packed and built > MAX_GROWTH * stored + SLACK:
        raise ModelLoadError(
            f"config.json in {path} describes a model of {built:,} parameters, but the checkpoint holds {stored:,}; "
            "do they belong together?"
        )
    check_fits(sum(buffer.nbytes for buffer in module.buffers()), torch.device("cpu"), str(path))


def check_parameters(module: Any, path: Path) -> None:
    """Checks the loaded parameters; a rank checks its own part.

    Raises:
        ModelLoadError: a parameter holds NaN or infinity; in float16, possibly only after the conversion.
    """
    for name, parameter in module.named_parameters():
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not is_finite(own.detach()):
            half = own.dtype == torch.float16
            raise ModelLoadError(
                f"the tensor {name!r} of {path} holds numbers that are NaN or infinite{' in float16' * half}; download "
                f"or save the checkpoint again{', or use bfloat16 or float32' * half}"
            )


def one_line(error: BaseException) -> str:
    """Returns an error's message in one line: its lines up to the first that does not end with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    text = " ".join(lines[:count])[:MAX_REASON] or type(error).__name__
    return text if text.isprintable() else ascii(text)
