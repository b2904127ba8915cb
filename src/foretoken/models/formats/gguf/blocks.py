"""The quantized types of GGUF as matrices quantized in groups.

A row is a sequence of blocks of 32 or 256 weights. Each type is unpacked into codes with a scale, and for some types an
offset, for each group of 16 or 32 weights; K-quants keep their two levels of scales, whose product is exact in float32.
Dequantized in float32 they are bitwise equal to what ``gguf.dequantize`` returns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.formats.grouped import MXFP4, GroupLayout, Groups, TwoLevels, half_powers

Bytes = NDArray[np.uint8]  # [blocks, bytes]
Floats = NDArray[np.float32]
Numbers = Floats | tuple[Floats, NDArray[np.int8]]  # [blocks, groups]; with two levels [blocks, 1] and [blocks, groups]
Unpacked = tuple[Bytes, Numbers, Numbers | None]  # codes [blocks, weights], scales, offsets

_K = GGMLQuantizationType
_IQ4 = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)  # a table of 16 levels, plus 128

_WIDE = 16  # bytes of complex128, the widest type that numpy copies at once

LAYOUTS = {
    _K.Q4_0: GroupLayout(4, 32, zero=8, half=True),
    _K.Q4_1: GroupLayout(4, 32, offsets=True, half=True),
    _K.Q5_0: GroupLayout(6, 32, zero=16, half=True),
    _K.Q5_1: GroupLayout(6, 32, offsets=True, half=True),
    _K.Q8_0: GroupLayout(8, 32, zero=128, half=True),
    _K.Q2_K: GroupLayout(4, 16, offsets=True, block=16),
    _K.Q3_K: GroupLayout(4, 16, zero=4, block=16),
    _K.Q4_K: GroupLayout(4, 32, offsets=True, block=8),
    _K.Q5_K: GroupLayout(6, 32, offsets=True, block=8),
    _K.Q6_K: GroupLayout(6, 16, zero=32, block=16),
    _K.IQ4_NL: GroupLayout(4, 32, zero=128, levels=_IQ4, half=True),
    _K.IQ4_XS: GroupLayout(4, 32, zero=128, levels=_IQ4, block=8),
    _K.MXFP4: MXFP4,
}
FLOATS = {_K.F32: torch.float32, _K.F16: torch.float16, _K.BF16: torch.bfloat16}


def groups_of(kind: GGMLQuantizationType, rows: Bytes) -> Groups:
    """Returns rows of a quantized matrix, unpacked.

    Args:
        kind: one of ``LAYOUTS``.
        rows: [outputs, bytes of a row] as the file stores them.
    """
    count, size = len(rows), GGML_QUANT_SIZES[kind][1]
    codes, scales, offsets = _UNPACK[kind](np.ascontiguousarray(rows).reshape(-1, size))

    def by_row(values: NDArray[np.uint8] | NDArray[np.int8] | Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values).reshape(count, -1))

    def numbers(values: Numbers) -> Tensor | TwoLevels:
        return TwoLevels(by_row(values[0]), by_row(values[1])) if isinstance(values, tuple) else by_row(values)

    return Groups(by_row(codes), numbers(scales), None if offsets is None else numbers(offsets))


def _half(blocks: Bytes, at: int) -> Floats:
    """Returns the float16 at a byte of each block, float32 [blocks, 1]."""
    return blocks.view(np.float16)[:, at // 2 : at // 2 + 1].astype(np.float32)


def _bits(packed: Bytes, width: int, bits: int) -> Bytes:
    """Returns codes [blocks, codes] of ``bits`` bits: bytes in runs of ``width``, each run's lowest bits first."""
    if width % _WIDE == 0:
        return _wide_bits(packed, width, bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = (packed.reshape(len(packed), -1, 1, width) >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(len(packed), -1)


def _wide_bits(packed: Bytes, width: int, bits: int) -> Bytes:
    """Does the same for runs of a multiple of sixteen bytes, in words of eight and sixteen bytes: four times faster."""
    words = np.ascontiguousarray(packed.view(np.complex128)).reshape(-1).view(np.uint64)
    mask = np.uint64(0x0101010101010101 * (2**bits - 1))
    codes = np.empty((words.nbytes // width, 8 // bits, width // _WIDE), np.complex128)
    for number in range(8 // bits):
        level = (words >> np.uint64(bits * number)) & mask
        codes[:, number] = level.view(np.complex128).reshape(len(codes), -1)
    return codes.view(np.uint8).reshape(len(packed), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Returns bits [blocks, 32] << 4 of blocks whose fifth bits are one after the other."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: Bytes) -> Unpacked:
    return _bits(b[:, 2:], 16, 4), _half(b, 0), None


def _q4_1(b: Bytes) -> Unpacked:
    return _bits(b[:, 4:], 16, 4), _half(b, 0), _half(b, 2)


def _q5_0(b: Bytes) -> Unpacked:
    return _bits(b[:, 6:], 16, 4) | _fifth_bits(b[:, 2:6]), _half(b, 0), None


def _q5_1(b: Bytes) -> Unpacked:
    return _bits(b[:, 8:], 16, 4) | _fifth_bits(b[:, 4:8]), _half(b, 0), _half(b, 2)


def _q8_0(b: Bytes) -> Unpacked:
    return b[:, 2:] ^ np.uint8(128), _half(b, 0), None  # int8 + 128


def _q2_k(b: Bytes) -> Unpacked:
    scales, mins = b[:, :16] & np.uint8(15), b[:, :16] >> np.uint8(4)
    levels = (_half(b, 80), scales.view(np.int8)), (-_half(b, 82), mins.view(np.int8))
    return _bits(b[:, 16:80], 32, 2), *levels


def _q3_k(b: Bytes) -> Unpacked:
    codes = _bits(b[:, 32:96], 32, 2) | _bits(b[:, :32], 32, 1) << np.uint8(2)
    low, high = _bits(b[:, 96:104], 8, 4), _bits(b[:, 104:108], 4, 2)
    scales = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    return codes, (_half(b, 108), scales), None


def _q4_k(b: Bytes) -> Unpacked:
    return _bits(b[:, 16:], 32, 4), *_k_scales(b)


def _q5_k(b: Bytes) -> Unpacked:
    return _bits(b[:, 48:], 32, 4) | _bits(b[:, 16:48], 32, 1) << np.uint8(4), *_k_scales(b)


def _k_scales(b: Bytes) -> tuple[Numbers, Numbers]:
    """Returns scales and offsets of Q4_K and Q5_K: eight of six bits each, packed into twelve bytes."""
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    low, two = np.uint8(63), np.uint8(48)
    scales = np.concatenate([first & low, third & np.uint8(15) | first >> np.uint8(2) & two], axis=1)
    mins = np.concatenate([second & low, third >> np.uint8(4) | second >> np.uint8(2) & two], axis=1)
    return (_half(b, 0), scales.view(np.int8)), (-_half(b, 2), mins.view(np.int8))


def _q6_k(b: Bytes) -> Unpacked:
    codes = _bits(b[:, :128], 64, 4) | _bits(b[:, 128:192], 32, 2) << np.uint8(4)
    return codes, (_half(b, 208), np.ascontiguousarray(b[:, 192:208]).view(np.int8)), None


def _iq4_xs(b: Bytes) -> Unpacked:
    low = _bits(b[:, 4:8], 1, 4)
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    scales = (low | high.astype(np.uint8) << np.uint8(4)).view(np.int8) - np.int8(32)
    return _bits(b[:, 8:], 16, 4), (_half(b, 0), scales), None


def _mxfp4(b: Bytes) -> Unpacked:
    return _bits(b[:, 1:], 16, 4), half_powers(b[:, :1]), None


_UNPACK: dict[GGMLQuantizationType, Callable[[Bytes], Unpacked]] = {
    _K.Q4_0: _q4_0,
    _K.Q4_1: _q4_1,
    _K.Q5_0: _q5_0,
    _K.Q5_1: _q5_1,
    _K.Q8_0: _q8_0,
    _K.Q2_K: _q2_k,
    _K.Q3_K: _q3_k,
    _K.Q4_K: _q4_k,
    _K.Q5_K: _q5_k,
    _K.Q6_K: _q6_k,
    _K.IQ4_NL: _q4_0,
    _K.IQ4_XS: _iq4_xs,
    _K.MXFP4: _mxfp4,
}
