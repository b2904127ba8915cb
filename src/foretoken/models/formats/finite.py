"""Refuses weights that hold NaN or infinity, which would load without an error and generate nonsense."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError


def is_finite(tensor: Tensor) -> bool:
    """Returns whether the tensor holds neither NaN nor infinity. The tensor is read once, at memory bandwidth."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:
        tensor = tensor.float()  # torch reduces no float8
    # A sum keeps every NaN and infinity, but sums of large numbers overflow; then the extremes decide.
    return bool(tensor.sum().isfinite()) or bool(torch.stack(tensor.aminmax()).isfinite().all())


def check_finite(name: str, tensor: Tensor, where: str) -> None:
    """Checks a tensor as it is stored.

    Args:
        name: the tensor's name in the checkpoint.
        tensor: its values.
        where: the file or folder that holds it.

    Raises:
        ModelLoadError: the tensor holds NaN or infinity.
    """
    if not is_finite(tensor):
        raise ModelLoadError(
            f"the tensor {name!r} in {where} holds NaN or infinite numbers; download or save the checkpoint again"
        )


def converted(name: str, tensor: Tensor, dtype: torch.dtype, copy: bool = False) -> Tensor:
    """Returns a finite tensor in ``dtype``.

    Raises:
        ModelLoadError: the tensor holds numbers beyond the range of float16.
    """
    result = tensor.to(dtype, copy=copy)
    if dtype == torch.float16 and result.dtype != tensor.dtype and not is_finite(result):
        raise ModelLoadError(
            f"the tensor {name!r} holds numbers beyond the range of float16; use dtype 'bfloat16' or 'float32'"
        )
    return result
