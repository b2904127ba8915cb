"""The quantized types of GGUF as matrices quantized in groups, read and written.

A row is a sequence of blocks of 32 or 256 weights. Each type is unpacked into codes with a scale, and for some types an
offset, for each group of 16 or 32 weights; K-quants keep their two levels of scales, whose product is exact in float32.
Dequantized in float32 they are bitwise equal to what ``gguf.dequantize`` returns.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.formats.quantize import MXFP4, GroupLayout, Groups, TwoLevels, half_powers

Bytes = NDArray[np.uint8]  # [blocks, bytes]
Floats = NDArray[np.float32]

_K = GGMLQuantizationType
_IQ4 = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)  # a table of 16 levels, plus 128
_WIDE = 16  # bytes of complex128, the widest type that numpy copies at once
_SIX_BITS = 12  # bytes of eight scales and eight minimums of six bits each

FLOATS = {_K.F32: torch.float32, _K.F16: torch.float16, _K.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class BlockNumbers:
    """The contents of blocks of one type."""

    codes: Bytes  # uint8 [blocks, weights]
    scale: Floats  # float32 [blocks], exact in float16; a power of two in MXFP4
    offset: Floats | None = None  # likewise, for types that have one; it is added (Q4_1) or, in K-quants, subtracted
    parts: NDArray[np.int8] | None = None  # integer scale of each group in K-quants, [blocks, groups]
    mins: NDArray[np.int8] | None = None  # integers that are multiplied by ``offset`` in K-quants, [blocks, groups]


@dataclass(frozen=True, slots=True)
class _Field:
    """Some bytes of a block."""

    # what they hold; "levels" are ``parts``, then ``mins`` if there are any
    numbers: Literal["codes", "levels", "levels of six bits", "scale", "offset", "exponent"]
    size: int = 2  # their number
    bits: int = 8  # bits of a code or level in them
    run: int = 1  # bytes of a run; the lowest bits of a run's bytes come first
    shift: int = 0  # position of these bits in the code or level


@dataclass(frozen=True, slots=True)
class _Block:
    """A type: its layout of groups and the fields of its blocks, in order; ``centre`` is the stored 0 of levels."""

    layout: GroupLayout
    fields: tuple[_Field, ...]
    centre: int = 0


def _codes(size: int, bits: int, run: int, shift: int = 0) -> _Field:
    return _Field("codes", size, bits, run, shift)


_SCALE, _OFFSET, _LEVELS = _Field("scale"), _Field("offset"), _Field("levels of six bits", _SIX_BITS)
_NIBBLES, _FIFTH = _codes(16, 4, 16), _codes(4, 1, 1, 4)
_BLOCKS = {
    _K.Q4_0: _Block(GroupLayout(4, 32, zero=8, half=True), (_SCALE, _NIBBLES)),
    _K.Q4_1: _Block(GroupLayout(4, 32, offsets=True, half=True), (_SCALE, _OFFSET, _NIBBLES)),
    _K.Q5_0: _Block(GroupLayout(6, 32, zero=16, half=True), (_SCALE, _FIFTH, _NIBBLES)),
    _K.Q5_1: _Block(GroupLayout(6, 32, offsets=True, half=True), (_SCALE, _OFFSET, _FIFTH, _NIBBLES)),
    _K.Q8_0: _Block(GroupLayout(8, 32, zero=128, half=True), (_SCALE, _codes(32, 8, 32))),
    _K.Q2_K: _Block(
        GroupLayout(4, 16, offsets=True, block=16),
        (_Field("levels", 16, 4, 16), _codes(64, 2, 32), _SCALE, _OFFSET),
    ),
    _K.Q3_K: _Block(
        GroupLayout(4, 16, zero=4, block=16),
        (_codes(32, 1, 32, 2), _codes(64, 2, 32), _Field("levels", 8, 4, 8), _Field("levels", 4, 2, 4, 4), _SCALE),
        centre=32,
    ),
    _K.Q4_K: _Block(GroupLayout(4, 32, offsets=True, block=8), (_SCALE, _OFFSET, _LEVELS, _codes(128, 4, 32))),
    _K.Q5_K: _Block(
        GroupLayout(6, 32, offsets=True, block=8),
        (_SCALE, _OFFSET, _LEVELS, _codes(32, 1, 32, 4), _codes(128, 4, 32)),
    ),
    _K.Q6_K: _Block(
        GroupLayout(6, 16, zero=32, block=16),
        (_codes(128, 4, 64), _codes(64, 2, 32, 4), _Field("levels", 16, 8, 16), _SCALE),
    ),
    _K.IQ4_NL: _Block(GroupLayout(4, 32, zero=128, levels=_IQ4, half=True), (_SCALE, _NIBBLES)),
    _K.IQ4_XS: _Block(
        GroupLayout(4, 32, zero=128, levels=_IQ4, block=8),
        (_SCALE, _Field("levels", 2, 2, 1, 4), _Field("levels", 4, 4, 1), _codes(128, 4, 16)),
        centre=32,
    ),
    _K.MXFP4: _Block(MXFP4, (_Field("exponent", 1), _NIBBLES)),
}
LAYOUTS = {kind: block.layout for kind, block in _BLOCKS.items()}
PACKED = (_K.Q4_0, _K.Q4_1, _K.Q5_0, _K.Q5_1, _K.Q8_0, _K.Q3_K, _K.Q4_K, _K.Q5_K, _K.Q6_K)  # types that are written


def groups_of(kind: GGMLQuantizationType, rows: Bytes) -> Groups:
    """Returns rows of a quantized matrix, unpacked.

    Args:
        kind: one of ``LAYOUTS``.
        rows: [outputs, bytes of a row] as the file stores them.
    """
    count, size = len(rows), GGML_QUANT_SIZES[kind][1]
    blocks = unpacked(kind, np.ascontiguousarray(rows).reshape(-1, size))

    def by_row(values: NDArray[np.uint8] | NDArray[np.int8] | Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values).reshape(count, -1))

    def numbers(values: Floats, levels: NDArray[np.int8] | None) -> Tensor | TwoLevels:
        return by_row(values) if levels is None else TwoLevels(by_row(values), by_row(levels))

    offsets = blocks.offset if blocks.offset is None or blocks.mins is None else -blocks.offset
    return Groups(
        by_row(blocks.codes),
        numbers(blocks.scale, blocks.parts),
        None if offsets is None else numbers(offsets, blocks.mins),
    )


def unpacked(kind: GGMLQuantizationType, data: Bytes) -> BlockNumbers:
    """Returns the contents of blocks [blocks, bytes of a block] of a type of ``LAYOUTS``."""
    block, at = _BLOCKS[kind], 0
    integers: dict[str, Bytes] = {}
    floats: dict[str, Floats] = {}
    for field in block.fields:
        part = data[:, at : at + field.size]
        if field.numbers in ("codes", "levels"):
            read = _bits(part, field.run, field.bits)
            if field.shift:
                read = read << np.uint8(field.shift)
            if field.numbers in integers:
                read |= integers[field.numbers]
            integers[field.numbers] = read
        elif field.numbers == "levels of six bits":
            integers["levels"] = _six_bits(part)
        elif field.numbers == "exponent":
            floats["scale"] = half_powers(part)[:, 0]
        else:
            floats[field.numbers] = data.view(np.float16)[:, at // 2].astype(np.float32)
        at += field.size
    codes, levels = integers["codes"], integers.get("levels")
    if kind == _K.Q8_0:  # int8
        codes = codes ^ np.uint8(128)
    parts = mins = None
    if levels is not None:
        signed, groups = levels.view(np.int8), block.layout.block
        signed = signed - np.int8(block.centre) if block.centre else signed
        parts, mins = signed[:, :groups], signed[:, groups:] if block.layout.offsets else None
    return BlockNumbers(codes, floats["scale"], floats.get("offset"), parts, mins)


def packed(kind: GGMLQuantizationType, blocks: BlockNumbers) -> Bytes:
    """Returns the bytes [blocks, bytes of a block] of a type of ``PACKED``: the inverse of ``unpacked``."""
    block, codes = _BLOCKS[kind], blocks.codes ^ np.uint8(128) if kind == _K.Q8_0 else blocks.codes
    parts = [levels for levels in (blocks.parts, blocks.mins) if levels is not None]
    levels = (np.concatenate(parts, axis=1) + np.int8(block.centre)).view(np.uint8) if parts else codes[:, :0]

    def written(field: _Field) -> Bytes:
        if field.numbers in ("codes", "levels"):
            integers = codes if field.numbers == "codes" else levels
            return _joined(integers >> np.uint8(field.shift) & np.uint8(2**field.bits - 1), field.run, field.bits)
        if field.numbers == "levels of six bits":
            return _to_six_bits(levels)
        numbers = blocks.scale if field.numbers == "scale" else blocks.offset
        assert numbers is not None
        return np.ascontiguousarray(numbers[:, None].astype(np.float16)).view(np.uint8)

    return np.concatenate([written(field) for field in block.fields], axis=1)


def _bits(packed: Bytes, width: int, bits: int) -> Bytes:
    """Returns codes [blocks, codes] of ``bits`` bits: bytes in runs of ``width``, each run's lowest bits first."""
    if bits == 8:
        return packed
    if (width, bits) == (1, 1):
        return np.unpackbits(packed, axis=1, bitorder="little")
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


def _joined(codes: Bytes, width: int, bits: int) -> Bytes:
    """Returns codes of ``bits`` bits as bytes: the inverse of ``_bits``."""
    runs = codes.reshape(len(codes), -1, 8 // bits, width)
    total = np.zeros((len(codes), runs.shape[1], width), np.uint8)
    for at in range(8 // bits):
        total |= runs[:, :, at] << np.uint8(at * bits)
    return total.reshape(len(codes), -1)


def _six_bits(packed: Bytes) -> Bytes:
    """Returns the scales and minimums of Q4_K and Q5_K [blocks, 16] from twelve bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    low, two = np.uint8(63), np.uint8(48)
    scales = first & low, third & np.uint8(15) | first >> np.uint8(2) & two
    mins = second & low, third >> np.uint8(4) | second >> np.uint8(2) & two
    return np.concatenate([*scales, *mins], axis=1)


def _to_six_bits(levels: Bytes) -> Bytes:
    """Returns scales and minimums as twelve bytes: the inverse of ``_six_bits``."""
    low, high = (levels[:, at : at + 4] for at in (0, 8)), [levels[:, at : at + 4] for at in (4, 12)]
    tops = [four | four_high >> np.uint8(4) << np.uint8(6) for four, four_high in zip(low, high, strict=True)]
    return np.concatenate([*tops, high[0] & np.uint8(15) | high[1] << np.uint8(4)], axis=1)
