"""Products of heads beside their layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.core.native.build import KernelsUnavailable
from foretoken.models.runners.linear import product
from foretoken.models.runners.native.product import NativeProduct


class HeadProduct:
    """A linear layer, ``x @ weight.T + bias``.

    The compiled kernels compute it where they can: torch's threads, once woken, wait actively for more work on the
    cores that the kernels need, which made the target's next pass an eighth longer (two Zen 5 cores, 1.2 B parameters).

    Args:
        weight: [out, in].
        bias: [out]; None for none.
        device: where it is computed.
        dtype: dtype of weight, bias and result.
    """

    __slots__ = ("_product",)

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype) -> None:
        weight, bias = weight.to(device, dtype), None if bias is None else bias.to(device, dtype)
        self._product: Callable[[Tensor], Tensor]
        try:
            if device.type != "cpu":
                raise KernelsUnavailable("the kernels run on CPUs")
            self._product = NativeProduct(weight, bias, dtype)
        except KernelsUnavailable:
            multiply = product(weight, bias)
            # A single row is doubled, see ``runners/linear.py``.
            self._product = lambda x: multiply(x) if len(x) > 1 else multiply(x.expand(2, -1).contiguous())[:1]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x [rows, in]."""
        return self._product(x)
