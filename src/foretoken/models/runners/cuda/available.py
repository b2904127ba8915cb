"""Whether Triton's kernels run on a device."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from typing import Any

import torch

CAPABILITY = (8, 0)  # of the GPU: products of bfloat16


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Returns whether Triton's kernels run on ``device``.

    They run on NVIDIA GPUs from Ampere on, with the Triton that comes with torch for CUDA. With ``TRITON_INTERPRET=1``
    Triton interprets them on the CPU, for tests.
    """
    if find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= CAPABILITY
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def kernels() -> Any:
    """Returns the module of the row-wise kernels. Triton is imported only where they run."""
    from foretoken.models.runners.cuda import rowwise

    return rowwise


def expert_kernels() -> Any:
    """Returns the module of the experts' kernels, likewise."""
    from foretoken.models.runners.cuda import experts

    return experts
