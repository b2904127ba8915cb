"""Matrices quantized in groups of inputs: codes of at most eight bits, with a scale and perhaps an offset per group.

Four-bit files (GGUF, AWQ, GPTQ, compressed-tensors) store matrices this way. A weight is
``(level(code) - zero) * scale + offset``, where a level is the code itself or an entry of a table. Products quantize
their inputs to int8, by row and group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

CENTRE = 128  # the zero of codes of eight bits that hold signed levels
_AT_ONCE = 2**20  # weights that are quantized or dequantized at once, so that no float32 copy of a matrix is made
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How codes become weights.

    Attributes:
        bits: bits of a code, 4 or 8.
        group: number of consecutive inputs that share a scale; a multiple of 16.
        zero: is subtracted from every level; the difference fits into int8.
        levels: the level of each code, 0 to 255; None if it is the code itself.
        offsets: whether groups have offsets.
    """

    bits: int
    group: int
    zero: int = 0
    levels: tuple[int, ...] | None = None
    offsets: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Some outputs of a grouped matrix.

    Attributes:
        codes: uint8 [outputs, in].
        scales: float32 [outputs, groups]; the last group may be shorter than the others.
        offsets: float32 [outputs, groups], or None.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def dequantised(self, layout: GroupLayout) -> Tensor:
        """Returns the weights, float32 [outputs, in]."""
        inputs = self.codes.shape[1]
        levels = self.codes if layout.levels is None else torch.tensor(layout.levels)[self.codes.long()]
        weights = F.pad(levels.float() - layout.zero, (0, -inputs % layout.group)).unflatten(1, (-1, layout.group))
        weights = weights * self.scales[:, :, None]
        if self.offsets is not None:
            weights = weights + self.offsets[:, :, None]
        return weights.flatten(1)[:, :inputs]


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """A matrix [out, in] quantized in groups.

    Attributes:
        shape: (out, in).
        layout: how codes become weights.
        rows: ``rows(first, last)`` reads these outputs. Files are read piece by piece, so that a matrix is never held
            both as it is stored and as it is packed.
    """

    shape: tuple[int, int]
    layout: GroupLayout
    rows: Callable[[int, int], Groups]

    @staticmethod
    def of(groups: Groups, layout: GroupLayout) -> Grouped:
        """Returns a matrix that is held in memory."""

        def rows(first: int, last: int) -> Groups:
            offsets = None if groups.offsets is None else groups.offsets[first:last]
            return Groups(groups.codes[first:last], groups.scales[first:last], offsets)

        return Grouped((groups.codes.shape[0], groups.codes.shape[1]), layout, rows)

    def part(self, first: int, last: int) -> Grouped:
        """Returns the matrix of outputs ``first`` to ``last``."""
        return Grouped((last - first, self.shape[1]), self.layout, lambda a, b: self.rows(first + a, first + b))

    @staticmethod
    def cat(parts: Sequence[Grouped]) -> Grouped:
        """Concatenates matrices along their outputs."""
        parts = joinable(parts)
        if len(parts) == 1:
            return parts[0]
        starts = [0, *accumulate(part.shape[0] for part in parts)]

        def rows(first: int, last: int) -> Groups:
            read = [
                part.rows(max(first - start, 0), min(last - start, part.shape[0]))
                for part, start in zip(parts, starts, strict=False)
                if start < last and first < start + part.shape[0]
            ]
            offsets = [groups.offsets for groups in read if groups.offsets is not None]
            codes, scales = torch.cat([groups.codes for groups in read]), torch.cat([groups.scales for groups in read])
            return Groups(codes, scales, torch.cat(offsets) if offsets else None)

        return Grouped((starts[-1], parts[0].shape[1]), parts[0].layout, rows)

    def to(self, device: torch.device) -> Grouped:
        """Returns the matrix itself: the product moves it when it dequantizes it."""
        return self

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weights [out, in] in ``dtype``."""
        whole = torch.empty(self.shape, dtype=dtype)
        for first, last in strips(self.shape):
            whole[first:last] = self.rows(first, last).dequantised(self.layout)
        return whole


def strips(shape: tuple[int, int], multiple: int = 16) -> list[tuple[int, int]]:
    """Returns ranges of outputs that are handled at once; all but the last have a multiple of ``multiple`` outputs."""
    step = max(1, _AT_ONCE // (shape[1] * multiple)) * multiple
    return [(first, min(first + step, shape[0])) for first in range(0, shape[0], step)]


def quantise_groups(weight: Tensor, group: int, bits: int = 4) -> Grouped:
    """Quantizes a weight [out, in] of any float dtype to the nearest code; symmetric in each group, scales in float16.

    The number of largest magnitude in a group takes the outermost negative code, as in GGUF's Q4_0, so that all codes
    are used.
    """
    zero = 2 ** (bits - 1)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales = torch.empty(weight.shape[0], -(-weight.shape[1] // group))
    for first, last in strips((weight.shape[0], weight.shape[1])):
        padded = F.pad(weight[first:last].float(), (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
        at = padded.abs().argmax(-1, keepdim=True)
        scale = (padded.gather(-1, at) / -zero).half().float()
        divisor = torch.where(scale.abs() < _TINY, 1.0, scale)
        code = (padded / divisor).round_().clamp_(-zero, zero - 1) + zero
        codes[first:last] = code.flatten(1)[:, : weight.shape[1]].to(torch.uint8)
        scales[first:last] = scale[..., 0]
    return Grouped.of(Groups(codes, scales), GroupLayout(bits, group, zero))


def joinable(parts: Sequence[Grouped]) -> Sequence[Grouped]:
    """Returns the matrices in one layout, so that they can be one product: unchanged if they have one.

    Otherwise codes take eight bits and groups the shortest length of all. Weights stay exactly the same.
    """
    if len({part.layout for part in parts}) == 1:
        return parts
    group, offsets = min(part.layout.group for part in parts), any(part.layout.offsets for part in parts)
    layout = GroupLayout(8, group, CENTRE, None, offsets)
    return [Grouped(part.shape, layout, _converter(part, layout)) for part in parts]


def _converter(part: Grouped, layout: GroupLayout) -> Callable[[int, int], Groups]:
    """Returns a reader of ``part`` in ``layout``: signed levels around CENTRE, groups split, zero offsets if needed."""
    old = part.layout
    split = old.group // layout.group
    groups = -(-part.shape[1] // layout.group)

    def rows(first: int, last: int) -> Groups:
        read = part.rows(first, last)
        levels = read.codes.long() if old.levels is None else torch.tensor(old.levels)[read.codes.long()]
        codes = (levels - old.zero + CENTRE).to(torch.uint8)
        scales = read.scales.repeat_interleave(split, 1)[:, :groups]
        offsets = None
        if layout.offsets:
            kept = torch.zeros_like(read.scales) if read.offsets is None else read.offsets
            offsets = kept.repeat_interleave(split, 1)[:, :groups]
        return Groups(codes, scales, offsets)

    return rows
