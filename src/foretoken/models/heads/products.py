"""Products of heads, which torch computes between passes of the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.core.threads import one_thread
from foretoken.models.runners.linear import product

# Bytes of a matrix that one thread multiplies sooner than torch wakes its other threads. Afterwards these wait actively
# for more, on the cores that the compiled kernels need: a draft of EAGLE-3 took a third longer (two Zen 4 cores).
SMALL = 2**22


class HeadProduct:
    """A linear layer, ``x @ weight.T + bias``.

    Args:
        weight: [out, in].
        bias: [out]; None for none.
        device: where it is computed.
        dtype: dtype of weight, bias and result.
    """

    __slots__ = ("_product", "_small")

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype) -> None:
        weight = weight.to(device, dtype)
        self._small = weight.is_cpu and weight.nbytes <= SMALL
        self._product = product(weight, None if bias is None else bias.to(device, dtype))

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x [rows, in]. A single row is doubled (see ``runners/linear.py``)."""
        rows = x if len(x) > 1 else x.expand(2, -1).contiguous()
        if not self._small:
            return self._product(rows)[: len(x)]
        with one_thread():
            return self._product(rows)[: len(x)]
