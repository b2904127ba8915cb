"""Matrix products whose rows do not depend on how many rows share the pass."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.quantize import Int8, Matrix, quantise_rows

# With AMX, oneDNN takes another bf16 kernel from 33 rows on, which adds in another order (measured).
AMX_ROWS = 32
# A float32 sum of this many products of two int8 is below 2^24, so it is exact in any order.
EXACT_TERMS = 1024


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN can hold this weight in its own layout (CPU, float32, or bf16 where the CPU has it)."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def can_pack_int8(device: torch.device) -> bool:
    """Whether oneDNN multiplies int8 here without saturating halfway, as it does on CPUs before VNNI."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


class Product(Protocol):
    """``x @ weight.T + bias``."""

    def __call__(self, x: Tensor, alone: bool = False) -> Tensor:
        """x [rows, in] -> [rows, out]. alone: the rows always go together, so their number is no chance."""


def product(weight: Matrix, bias: Tensor | None = None) -> Product:
    """The fastest product for that weight."""
    return Int8Linear(weight, bias) if isinstance(weight, Int8) else Linear(weight, bias)


class Linear:
    """The weight packed once for oneDNN where that is possible.

    A packed weight streams at up to twice the bandwidth of ``F.linear``'s, and its rows are bit-equal for
    any row count from 2 up; a lone row may take another kernel, so passes are padded to two.
    """

    __slots__ = ("_bias", "_most", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = can_pack(weight.dtype, weight.device)
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        else:
            self._weight = weight.clone() if weight.device.type == "cpu" else weight  # it may be a mapped file
        self._bias = bias
        amx = self._packed and weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        self._most = AMX_ROWS if amx else 0

    def __call__(self, x: Tensor, alone: bool = False) -> Tensor:
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        if alone or not self._most or x.shape[0] <= self._most:
            return self._multiply(x)
        return torch.cat([self._multiply(part) for part in x.tensor_split(-(-x.shape[0] // self._most))])

    def _multiply(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class Int8Linear:
    """Int8 weights times rows quantised as they come (W8A8): oneDNN's product, or exact sums in float32."""

    __slots__ = ("_bias", "_packed", "_scales", "_values", "_zeros")

    def __init__(self, weight: Int8, bias: Tensor | None = None) -> None:
        self._packed = can_pack_int8(weight.values.device)
        self._scales, self._bias = weight.scales, None if bias is None else bias.float()
        if self._packed:
            self._values = torch.ops.onednn.qlinear_prepack(weight.values.contiguous(), None)
            self._zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
        else:
            self._values = weight.values.clone()

    def __call__(self, x: Tensor, alone: bool = False) -> Tensor:
        values, scales = quantise_rows(x)
        y = self._onednn(values) if self._packed else exact_product(values, self._values) * self._scales
        y = y * scales if self._bias is None else torch.addcmul(self._bias, y, scales)
        return y.to(x.dtype)

    def _onednn(self, values: Tensor) -> Tensor:
        """[rows, out] float32: the integer sums times the channels' scales."""
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            values, 1.0, 0, self._values, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """int8 [rows, in] times int8 [out, in] -> float32 [rows, out], exact sums rounded once; for any device."""
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[1], EXACT_TERMS):
        terms = slice(start, start + EXACT_TERMS)
        total += F.linear(x[:, terms].float(), weight[:, terms].float()).to(torch.int32)
    return total.float()
