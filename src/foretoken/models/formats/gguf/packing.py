"""Codes and scales as the blocks of GGUF's quantized types: the inverse of ``blocks.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from foretoken.models.formats.gguf.blocks import Bytes, Floats

_K = GGMLQuantizationType


@dataclass(frozen=True, slots=True, eq=False)
class BlockNumbers:
    """The contents of blocks of one type.

    Attributes:
        codes: uint8 [blocks, weights].
        scale: float32 [blocks], exact in float16.
        offset: likewise, for types that have one; it is added (Q4_1) or, in K-quants, subtracted.
        parts: integer scale of each group in K-quants, [blocks, groups].
        mins: integers that are multiplied by ``offset`` in K-quants, [blocks, groups].
    """

    codes: Bytes
    scale: Floats
    offset: Floats | None = None
    parts: NDArray[np.int8] | None = None
    mins: NDArray[np.int8] | None = None


def packed(kind: GGMLQuantizationType, blocks: BlockNumbers) -> Bytes:
    """Returns the bytes [blocks, bytes of a block] of a type of ``PACKED``."""
    return np.concatenate(PACKED[kind](blocks), axis=1)


def _half(numbers: Floats | None) -> Bytes:
    assert numbers is not None
    return np.ascontiguousarray(numbers[:, None].astype(np.float16)).view(np.uint8)


def _joined(codes: Bytes, width: int, bits: int) -> Bytes:
    """Returns codes of ``bits`` bits packed into bytes, in runs of ``width`` bytes, the lowest bits first."""
    per = 8 // bits
    runs = codes.reshape(len(codes), -1, per, width)
    total = np.zeros((len(codes), runs.shape[1], width), np.uint8)
    for at in range(per):
        total |= runs[:, :, at] << np.uint8(at * bits)
    return total.reshape(len(codes), -1)


def _low(codes: Bytes, bits: int) -> Bytes:
    return codes & np.uint8(2**bits - 1)


def _fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")


def _q4_0(b: BlockNumbers) -> Sequence[Bytes]:
    return _half(b.scale), _joined(b.codes, 16, 4)


def _q4_1(b: BlockNumbers) -> Sequence[Bytes]:
    return _half(b.scale), _half(b.offset), _joined(b.codes, 16, 4)


def _q5_0(b: BlockNumbers) -> Sequence[Bytes]:
    return _half(b.scale), _fifth_bits(b.codes), _joined(_low(b.codes, 4), 16, 4)


def _q5_1(b: BlockNumbers) -> Sequence[Bytes]:
    return _half(b.scale), _half(b.offset), _fifth_bits(b.codes), _joined(_low(b.codes, 4), 16, 4)


def _q8_0(b: BlockNumbers) -> Sequence[Bytes]:
    return _half(b.scale), b.codes ^ np.uint8(128)


def _q3_k(b: BlockNumbers) -> Sequence[Bytes]:
    assert b.parts is not None
    parts = (b.parts + np.int8(32)).view(np.uint8)
    high = _joined(b.codes >> np.uint8(2), 32, 1)
    low = _joined(_low(b.codes, 2), 32, 2)
    return high, low, _joined(_low(parts, 4), 8, 4), _joined(parts >> np.uint8(4), 4, 2), _half(b.scale)


def _q4_k(b: BlockNumbers) -> Sequence[Bytes]:
    return _half(b.scale), _half(b.offset), _k_scales(b), _joined(b.codes, 32, 4)


def _q5_k(b: BlockNumbers) -> Sequence[Bytes]:
    high, low = _joined(b.codes >> np.uint8(4), 32, 1), _joined(_low(b.codes, 4), 32, 4)
    return _half(b.scale), _half(b.offset), _k_scales(b), high, low


def _k_scales(b: BlockNumbers) -> Bytes:
    """Returns eight scales and eight minimums of six bits each, in twelve bytes."""
    assert b.parts is not None and b.mins is not None
    parts, mins = b.parts.view(np.uint8), b.mins.view(np.uint8)
    two = np.uint8(2)
    first = parts[:, :4] | (parts[:, 4:] >> np.uint8(4)) << np.uint8(6)
    second = mins[:, :4] | (mins[:, 4:] >> np.uint8(4)) << np.uint8(6)
    third = _low(parts[:, 4:], 4) | _low(mins[:, 4:], 4) << (two + two)
    return np.concatenate([first, second, third], axis=1)


def _q6_k(b: BlockNumbers) -> Sequence[Bytes]:
    assert b.parts is not None
    low, high = _joined(_low(b.codes, 4), 64, 4), _joined(b.codes >> np.uint8(4), 32, 2)
    return low, high, np.ascontiguousarray(b.parts).view(np.uint8), _half(b.scale)


PACKED: dict[GGMLQuantizationType, Callable[[BlockNumbers], Sequence[Bytes]]] = {
    _K.Q4_0: _q4_0,
    _K.Q4_1: _q4_1,
    _K.Q5_0: _q5_0,
    _K.Q5_1: _q5_1,
    _K.Q8_0: _q8_0,
    _K.Q3_K: _q3_k,
    _K.Q4_K: _q4_k,
    _K.Q5_K: _q5_k,
    _K.Q6_K: _q6_k,
}
