"""Quantized matrices, and quantizers that make them on loading.

W8A8: int8 weights with one symmetric scale per output channel, activations quantized row by row.
x @ W.T = (q_x @ q_W.T) * scale_x * scale_W. The sum runs over integers, so its order does not matter, and a row's
scale depends on that row alone. So rows do not depend on what else is in the pass.

Groups of inputs: codes of at most eight bits, with a scale and perhaps an offset per group. Four-bit files (GGUF, AWQ,
GPTQ, compressed-tensors) store matrices this way. A weight is ``(level(code) - zero) * scale + offset``, where a level
is the code itself or an entry of a table. Products quantize their inputs to int8, by row and group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

CENTRE = 128  # the zero of codes of eight bits that hold signed levels
NARROW = 32  # likewise for codes of six bits
_AT_ONCE = 2**20  # weights quantized or dequantized at once, so that no float32 copy of a matrix is made
_TINY = 1e-30  # largest magnitude of a row of zeros, to divide by


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Encoding of weights as codes."""

    bits: int  # bits of a code, 4, 6 or 8
    group: int  # number of consecutive inputs that share a scale; a multiple of 16
    zero: int = 0  # zero point, subtracted from every level; the difference fits into int8
    levels: tuple[int, ...] | None = None  # the level of each code, 0 to 255; None if it is the code itself
    offsets: bool = False
    block: int = 1  # number of groups that share the outer scale (and offset) of ``TwoLevels``; 1 for one level
    half: bool = False  # whether scales and offsets, if they have one level, are exact in float16

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest level less ``zero``."""
        levels = self.levels or (0, 2**self.bits - 1)
        return min(levels) - self.zero, max(levels) - self.zero


@dataclass(frozen=True, slots=True, eq=False)
class TwoLevels:
    """Scales or offsets in two levels: a float per block of groups times an integer per group, as in K-quants."""

    wholes: Tensor  # float32 [outputs, blocks], exact in float16
    parts: Tensor  # int8 [outputs, groups]

    def __getitem__(self, outputs: slice) -> TwoLevels:
        return TwoLevels(self.wholes[outputs], self.parts[outputs])


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Some outputs of a grouped matrix."""

    codes: Tensor  # uint8 [outputs, in]
    # float32 [outputs, groups], or in two levels; the last group may be shorter than the others
    scales: Tensor | TwoLevels
    offsets: Tensor | TwoLevels | None = None  # likewise, or None

    def __getitem__(self, outputs: slice) -> Groups:
        offsets = None if self.offsets is None else self.offsets[outputs]
        return Groups(self.codes[outputs], self.scales[outputs], offsets)

    def dequantize(self, layout: GroupLayout) -> Tensor:
        inputs = self.codes.shape[1]
        levels = self.codes if layout.levels is None else torch.tensor(layout.levels)[self.codes.long()]
        weights = F.pad(levels.float() - layout.zero, (0, -inputs % layout.group)).unflatten(1, (-1, layout.group))
        weights = weights * flat(self.scales)[:, :, None]
        if self.offsets is not None:
            weights = weights + flat(self.offsets)[:, :, None]
        return weights.flatten(1)[:, :inputs]


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """A matrix [out, in] quantized in groups."""

    shape: tuple[int, int]  # (out, in)
    layout: GroupLayout  # encoding of the codes
    # ``rows(first, last)`` reads these outputs; files are read in parts, so that a matrix is never held twice, stored
    # and packed
    rows: Callable[[int, int], Groups]

    @staticmethod
    def of(groups: Groups, layout: GroupLayout) -> Grouped:
        shape = groups.codes.shape[0], groups.codes.shape[1]
        return Grouped(shape, layout, lambda first, last: groups[first:last])

    def part(self, first: int, last: int) -> Grouped:
        return Grouped((last - first, self.shape[1]), self.layout, lambda a, b: self.rows(first + a, first + b))

    def every(self, step: int, first: int) -> Grouped:
        """Returns the matrix of every ``step``-th output from ``first`` on."""

        def rows(a: int, b: int) -> Groups:
            return self.rows(a * step, min(b * step, self.shape[0]))[first::step]

        return Grouped((len(range(first, self.shape[0], step)), self.shape[1]), self.layout, rows)

    def with_inputs(self, order: Tensor) -> Grouped | None:
        """Returns the matrix with its inputs in another order; None if that would split groups.

        order: the present index of each run of inputs; all runs have the same length.
        """
        run, layout = self.shape[1] // len(order), self.layout
        if run * len(order) != self.shape[1] or run % layout.group:
            return None

        def moved(numbers: Tensor) -> Tensor:
            return numbers.unflatten(1, (len(order), -1))[:, order].flatten(1)

        def rows(first: int, last: int) -> Groups:
            read = self.rows(first, last)
            offsets = None if read.offsets is None else moved(flat(read.offsets))
            return Groups(moved(read.codes), moved(flat(read.scales)), offsets)

        return Grouped(self.shape, replace(layout, block=1), rows)

    @staticmethod
    def cat(parts: Sequence[Grouped]) -> Grouped:
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
            codes = torch.cat([groups.codes for groups in read])
            return Groups(codes, _stack([groups.scales for groups in read]), _stack(offsets) if offsets else None)

        return Grouped((starts[-1], parts[0].shape[1]), parts[0].layout, rows)

    def to(self, device: torch.device) -> Grouped:
        """Returns the matrix itself: the product moves the weights to the device when it dequantizes them."""
        return self

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.empty(self.shape, dtype=dtype)
        for first, last in strips(self.shape):
            values[first:last] = self.rows(first, last).dequantize(self.layout)
        return values


@runtime_checkable
class GroupedWeights(Protocol):
    """The tensors of a checkpoint, some of which are quantized in groups."""

    def grouped(self, name: str) -> Grouped | None:
        """Returns a matrix stored in groups; None for any other tensor."""


def flat(numbers: Tensor | TwoLevels) -> Tensor:
    if isinstance(numbers, Tensor):
        return numbers
    groups, blocks = numbers.parts.shape[1], numbers.wholes.shape[1]
    return numbers.wholes.repeat_interleave(-(-groups // blocks), 1)[:, :groups] * numbers.parts


def strips(shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns ranges of outputs to process at once; the length of all but the last is a multiple of 16."""
    step = max(1, _AT_ONCE // (shape[1] * 16)) * 16
    return [(first, min(first + step, shape[0])) for first in range(0, shape[0], step)]


def quantize_groups(weight: Tensor, group: int, bits: int = 4) -> Grouped:
    """Quantizes a weight [out, in] of any float dtype to the nearest code; symmetric in each group, scales in float16.

    As in GGUF's Q4_0, the element of largest magnitude in a group gets the lowest code, so that all codes are used.
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
    return Grouped.of(Groups(codes, scales), GroupLayout(bits, group, zero, half=True))


def joinable(parts: Sequence[Grouped]) -> Sequence[Grouped]:
    """Returns the matrices in one layout, so that they can be one product: unchanged if their layouts are equal.

    Otherwise codes get six bits, or eight if needed, and groups the shortest length of all. The weights stay exactly
    the same.
    """
    if len({part.layout for part in parts}) == 1:
        return parts
    group, offsets = min(part.layout.group for part in parts), any(part.layout.offsets for part in parts)
    spans = {part.layout.block * part.layout.group for part in parts if part.layout.block > 1}
    two_levels = len(spans) == 1 and all(part.layout.block > 1 for part in parts)
    half = all(part.layout.half for part in parts)
    narrow = all(low >= -NARROW and high < NARROW for low, high in (part.layout.range for part in parts))
    bits, zero = (6, NARROW) if narrow else (8, CENTRE)
    layout = GroupLayout(bits, group, zero, None, offsets, spans.pop() // group if two_levels else 1, half)
    return [Grouped(part.shape, layout, _converter(part, layout)) for part in parts]


def _converter(part: Grouped, layout: GroupLayout) -> Callable[[int, int], Groups]:
    """Returns a reader of ``part`` in ``layout``: levels around its zero, groups split, zero offsets if needed."""
    old = part.layout
    split = old.group // layout.group
    groups = -(-part.shape[1] // layout.group)

    def rows(first: int, last: int) -> Groups:
        read = part.rows(first, last)
        levels = read.codes.long() if old.levels is None else torch.tensor(old.levels)[read.codes.long()]
        if layout.block == 1:
            read = Groups(read.codes, flat(read.scales), None if read.offsets is None else flat(read.offsets))
        codes = (levels - old.zero + layout.zero).to(torch.uint8)
        scales = _split(read.scales, split, groups)
        if not layout.offsets:
            return Groups(codes, scales)
        return Groups(codes, scales, _zeros(scales) if read.offsets is None else _split(read.offsets, split, groups))

    return rows


def _split(numbers: Tensor | TwoLevels, times: int, groups: int) -> Tensor | TwoLevels:
    """Repeats each group's number ``times`` times, for groups that are split. Returns the first ``groups``."""
    if isinstance(numbers, TwoLevels):
        return TwoLevels(numbers.wholes, numbers.parts.repeat_interleave(times, 1)[:, :groups])
    return numbers.repeat_interleave(times, 1)[:, :groups]


def _zeros(numbers: Tensor | TwoLevels) -> Tensor | TwoLevels:
    if isinstance(numbers, TwoLevels):
        return TwoLevels(torch.zeros_like(numbers.wholes), torch.zeros_like(numbers.parts))
    return torch.zeros_like(numbers)


def _stack(numbers: Sequence[Tensor | TwoLevels]) -> Tensor | TwoLevels:
    """Concatenates scales or offsets along the outputs. All have one level, or all have two."""
    levels = [number for number in numbers if isinstance(number, TwoLevels)]
    if levels:
        return TwoLevels(torch.cat([level.wholes for level in levels]), torch.cat([level.parts for level in levels]))
    return torch.cat([number for number in numbers if isinstance(number, Tensor)])


_ZERO = 12
_E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # twice the value of each code, plus the zero point
MXFP4 = GroupLayout(4, 32, zero=_ZERO, levels=_E2M1)


def half_powers(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns half of 2 ** (exponent - 127), the scale of levels that are doubled; the two smallest are denormal."""
    wide = exponents.astype(np.uint32)
    pattern = np.where(wide < 2, np.uint32(0x00200000) << wide, (wide - 1) << np.uint32(23))
    return pattern.astype(np.uint32).view(np.float32)


DEFAULT_GROUP = 32  # group of "int4"
LIMIT = 127.0  # symmetric: -128 is not used
_INT8_AT_ONCE = 2**18  # weights quantized at once, so that no float32 copy of a whole matrix is made


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
        if len(parts) == 1:
            return parts[0]
        return Int8(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]))


Matrix = Tensor | Int8 | Grouped


@dataclass(frozen=True, slots=True)
class Quantizer:
    """A scheme that quantizes weights on loading."""

    bits: int  # bits of a code, 8 or 4
    group: int | None = None  # number of inputs that share a scale; None: one scale per output (``Int8``)

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
    step = max(1, _INT8_AT_ONCE // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        values[rows], scale = quantize_rows(weight[rows])
        scales[rows] = scale[:, 0]
    return Int8(values, scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each row of x [rows, n] by its largest magnitude.

    Returns values, int8 [rows, n], and scales, float32 [rows, 1]; x is about values * scales.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True).clamp_min_(_TINY)
    return x.mul(LIMIT / largest).round_().to(torch.int8), largest / LIMIT
