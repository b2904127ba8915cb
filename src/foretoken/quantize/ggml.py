"""Quantizes matrices to the types of GGUF: a grid for each type, codes to the nearest or by GPTQ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from foretoken.models.formats.gguf.blocks import LAYOUTS, PACKED, BlockNumbers, Bytes, packed
from foretoken.quantize.rounding import Grid, Rounding, affine_scales, symmetric_scales

_K = GGMLQuantizationType
TYPES = PACKED
_AFFINE = {_K.Q4_1: (-1.0, 20), _K.Q4_K: (-1.0, 20), _K.Q5_1: (-0.5, 15), _K.Q5_K: (-0.5, 15)}  # ranges tried
_SIGNED_PARTS = {_K.Q6_K: 128, _K.Q3_K: 32}  # the integer of the largest scale, negative
_UNSIGNED_PARTS = 63


@dataclass(frozen=True, slots=True, eq=False)
class _Scales:
    """A grid, and its scales in the form of the type's blocks."""

    grid: Grid
    scale: Tensor
    offset: Tensor | None = None
    parts: Tensor | None = None
    mins: Tensor | None = None


def to_blocks(weights: Tensor, kind: GGMLQuantizationType, rounding: Rounding) -> Bytes:
    """Returns a matrix as the bytes of a type, uint8 [out, bytes of a row].

    Args:
        weights: float32 [out, in]; the type's blocks divide the inputs.
        kind: one of ``TYPES``.
    """
    scales = _scales(weights, kind, rounding.importance)
    low = scales.grid.low if kind != _K.Q8_0 else -128
    size = GGML_QUANT_SIZES[kind][0]
    unsigned = (rounding.codes(weights, scales.grid) - low).to(torch.uint8).reshape(-1, size)

    def integers(numbers: Tensor | None) -> np.ndarray | None:
        return None if numbers is None else numbers.reshape(len(unsigned), -1).to(torch.int8).numpy()

    blocks = BlockNumbers(
        unsigned.numpy(),
        scales.scale.reshape(-1).numpy(),
        None if scales.offset is None else scales.offset.reshape(-1).numpy(),
        integers(scales.parts),
        integers(scales.mins),
    )
    return packed(kind, blocks).reshape(weights.shape[0], -1)


def _scales(weights: Tensor, kind: GGMLQuantizationType, importance: Tensor | None) -> _Scales:
    layout = LAYOUTS[kind]
    x = weights.unflatten(1, (-1, layout.group))
    group_importance = None if importance is None else importance.unflatten(0, (-1, layout.group)).expand_as(x)
    if kind == _K.Q8_0:
        scale = _half(x.abs().amax(-1) / 127)
        return _Scales(Grid(scale, -127, 127, layout.group), scale)
    if kind in _AFFINE:
        return _affine(x, kind, group_importance)
    if kind in _SIGNED_PARTS:
        return _two_levels(x, kind, group_importance)
    scale = _half(
        symmetric_scales(x, -layout.zero, torch.ones_like(x) if group_importance is None else group_importance)
    )
    return _Scales(Grid(scale, -layout.zero, layout.zero - 1, layout.group), scale)


def _affine(x: Tensor, kind: GGMLQuantizationType, importance: Tensor | None) -> _Scales:
    """Returns scales and minimums; those of K-quants in two levels."""
    layout = LAYOUTS[kind]
    high = 15 if kind in (_K.Q4_1, _K.Q4_K) else 31
    spread = x.square().mean(-1, keepdim=True).sqrt()
    weights = spread + x.abs() if importance is None else importance * (2 * spread.square() + x.square()).sqrt()
    scale, offset = affine_scales(x, high, weights, *_AFFINE[kind])
    if layout.block == 1:
        scale, offset = _half(scale), _half(offset)
        return _Scales(Grid(scale, 0, high, layout.group, offset), scale, offset)
    wholes, parts = _levels(scale, layout.block)
    low, mins = _levels(-offset, layout.block)
    grid = Grid(_product(wholes, parts), 0, high, layout.group, -_product(low, mins))
    return _Scales(grid, wholes, low, parts, mins)


def _levels(numbers: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns values [out, groups], not negative, as a float16 for each block times integers of six bits."""
    blocks = numbers.unflatten(1, (-1, block))
    largest = blocks.amax(-1, keepdim=True)
    parts = (blocks * (_UNSIGNED_PARTS / largest.masked_fill(largest <= 0, torch.inf))).round_()
    return _half(largest[..., 0] / _UNSIGNED_PARTS), parts.clamp_(0, _UNSIGNED_PARTS)


def _two_levels(x: Tensor, kind: GGMLQuantizationType, importance: Tensor | None) -> _Scales:
    """Returns signed scales in two levels, of types without minimums."""
    layout, limit = LAYOUTS[kind], _SIGNED_PARTS[kind]
    scale = symmetric_scales(x, -layout.zero, x.square() if importance is None else importance)
    blocks = scale.unflatten(1, (-1, layout.block))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    inverse = -limit / largest.masked_fill(largest == 0, torch.inf)
    wholes = _half(torch.where(largest == 0, 0.0, 1 / inverse)[..., 0])
    parts = (blocks * inverse).round_().clamp_(-limit, limit - 1)
    return _Scales(Grid(_product(wholes, parts), -layout.zero, layout.zero - 1, layout.group), wholes, None, parts)


def _product(wholes: Tensor, parts: Tensor) -> Tensor:
    return (wholes[..., None] * parts).flatten(1)


def _half(numbers: Tensor) -> Tensor:
    """Returns values rounded to float16."""
    return numbers.half().float()
