"""Matrix products whose rows do not depend on how many rows share the pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN can hold this weight in its own layout (CPU, float32, or bf16 where the CPU has it)."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear:
    """``x @ weight.T + bias``, the weight packed once for oneDNN where that is possible.

    A packed weight streams at up to twice the bandwidth of ``F.linear``'s, and its rows are bit-equal for
    any row count from 2 up; a lone row may take another kernel, so passes are padded to two.
    """

    __slots__ = ("_bias", "_packed", "_weight", "shape")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = tuple(weight.shape)
        self._packed = can_pack(weight.dtype, weight.device)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self._packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]"""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)
