"""W8A8 quantization: int8 weights with one symmetric scale per output channel, activations quantized row by row.

x @ W.T = (q_x @ q_W.T) * scale_x * scale_W. The sum runs over integers, so its order does not matter, and a row's
scale depends on that row alone. So rows do not depend on what else is in the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.models.formats.grouped import Grouped, quantize_groups

DEFAULT_GROUP = 32  # group of "int4"
LIMIT = 127.0  # symmetric: -128 is not used
_TINY = 1e-30  # largest magnitude of a row of zeros, to divide by
_AT_ONCE = 2**18  # weights quantized at once, so that no float32 copy of a whole matrix is made


@dataclass(frozen=True, slots=True, eq=False)
class Int8:
    """A matrix [out, in] as ``values[o, i] * scales[o]``."""

    values: Tensor  # int8 [out, in]
    scales: Tensor  # float32 [out]

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def to(self, device: torch.device) -> Int8:
        return Int8(self.values.to(device), self.scales.to(device))

    def dequantize(self) -> Tensor:
        return self.values.float() * self.scales[:, None]

    @staticmethod
    def cat(parts: Sequence[Int8]) -> Int8:
        """Concatenates matrices along their outputs."""
        if len(parts) == 1:
            return parts[0]
        return Int8(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]))


Matrix = Tensor | Int8 | Grouped


@dataclass(frozen=True, slots=True)
class Quantizer:
    """A scheme that quantizes weights on loading.

    Attributes:
        bits: bits of a code, 8 or 4.
        group: number of inputs that share a scale; None: one scale per output (``Int8``).
    """

    bits: int
    group: int | None = None

    @staticmethod
    def of(name: str | None) -> Quantizer | None:
        """Returns the scheme with a name of ``options.QUANTIZATIONS``; None for None."""
        if name is None:
            return None
        scheme, _, group = name.partition("-g")
        return Quantizer(8) if scheme == "int8" else Quantizer(4, int(group or DEFAULT_GROUP))

    @property
    def weight_bits(self) -> float:
        """Bits of a weight, with its fraction of a group's scale."""
        return self.bits + (16 / self.group if self.group else 0)

    def __call__(self, weight: Tensor) -> Matrix:
        """Returns a weight [out, in] of any float dtype quantized."""
        return quantize(weight) if self.group is None else quantize_groups(weight, self.group, self.bits)


def stacked(parts: Sequence[Matrix]) -> Matrix:
    """Concatenates matrices of one kind along their outputs."""
    if len(parts) == 1:
        return parts[0]
    grouped = [part for part in parts if isinstance(part, Grouped)]
    if grouped:
        return Grouped.cat(grouped)
    quantized = [part for part in parts if isinstance(part, Int8)]
    return Int8.cat(quantized) if quantized else torch.cat([part for part in parts if isinstance(part, Tensor)])


def floats(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Returns a matrix [out, in] as floats: unchanged if it is not quantized."""
    if isinstance(matrix, Grouped):
        return matrix.dequantize(dtype)
    return matrix.dequantize().to(dtype) if isinstance(matrix, Int8) else matrix


def quantize(weight: Tensor) -> Int8:
    """Quantizes a weight [out, in] of any float dtype, each output channel by its largest magnitude.

    Values are rounded half to even.
    """
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    step = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        values[rows], scale = quantize_rows(weight[rows])
        scales[rows] = scale[:, 0]
    return Int8(values, scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each row of x [rows, n] by its largest magnitude.

    Returns:
        Values, int8 [rows, n], and scales, float32 [rows, 1]; x is about values * scales.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True).clamp_min_(_TINY)
    return x.mul(LIMIT / largest).round_().to(torch.int8), largest / LIMIT
