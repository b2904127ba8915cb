"""Triton kernels for CUDA whose rows do not depend on what shares the pass."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch

CAPABILITY = (8, 0)  # required of the GPU, for products of bfloat16


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Returns whether Triton's kernels run on ``device``: an NVIDIA GPU, with the Triton that torch for CUDA brings."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= CAPABILITY


def kernels() -> Any:
    """Returns the module of the row-wise kernels. Triton is imported on first use."""
    from foretoken.models.runners.triton_kernels import rowwise

    return rowwise


def attention_kernels() -> Any:
    from foretoken.models.runners.triton_kernels import attention

    return attention


def expert_kernels() -> Any:
    from foretoken.models.runners.triton_kernels import experts

    return experts


def recurrent_kernels() -> Any:
    from foretoken.models.runners.triton_kernels import recurrent

    return recurrent


def sampling_kernels() -> Any:
    from foretoken.models.runners.triton_kernels import sampling

    return sampling
