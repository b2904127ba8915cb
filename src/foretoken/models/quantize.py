"""Int8 weights: one scale per output channel, symmetric, and activations quantised row by row as they come.

x @ W.T = (q_x @ q_W.T) * scale_x * scale_W. The sum runs over integers, so it does not depend on its order, and a
row's scale depends on that row alone: such rows are bit-equal whatever shares the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LIMIT = 127.0  # symmetric: -128 is not used
_TINY = 1e-30  # the scale of a row of zeros; any number that divides them
_AT_ONCE = 2**18  # weights quantised at once, so that no float32 copy of a whole matrix is made


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

    def dequantised(self) -> Tensor:
        """float32 [out, in]"""
        return self.values.float() * self.scales[:, None]

    @staticmethod
    def cat(parts: Sequence[Int8]) -> Int8:
        """Below one another."""
        if len(parts) == 1:
            return parts[0]
        return Int8(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]))


Matrix = Tensor | Int8


def stacked(parts: Sequence[Matrix]) -> Matrix:
    """Matrices of one kind below one another."""
    if len(parts) == 1:
        return parts[0]
    quantised = [part for part in parts if isinstance(part, Int8)]
    return Int8.cat(quantised) if quantised else torch.cat([part for part in parts if isinstance(part, Tensor)])


def quantise(weight: Tensor) -> Int8:
    """Each output channel by its largest magnitude, rounded half to even. weight [out, in], any float dtype"""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    step = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        values[rows], scale = quantise_rows(weight[rows])
        scales[rows] = scale[:, 0]
    return Int8(values, scales)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, n] -> int8 [rows, n] and float32 scales [rows, 1], with x = values * scales nearly"""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True).clamp_min_(_TINY)
    return x.mul(LIMIT / largest).round_().to(torch.int8), largest / LIMIT
