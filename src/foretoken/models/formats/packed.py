"""Checkpoints whose matrices are packed codes of four or eight bits: compressed-tensors, AWQ, GPTQ and MXFP4.

A weight is (code - zero) * scale, with a zero and a scale for each group of inputs of an output:

- compressed-tensors ``pack-quantized``: codes of an output in int32 words along its inputs, zeros along the outputs;
- AWQ ``gemm``: codes and zeros in words of eight outputs, in the order 0 2 4 6 1 3 5 7 from the lowest bits;
- GPTQ: codes in words along the inputs, zeros along the outputs and, in version 1, less 1;
- MXFP4 (``*_blocks``, ``*_scales``): pairs of e2m1 codes in bytes, with a power of two for each 32 inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import shortened
from foretoken.models.formats.quantize import MXFP4, Grouped, GroupLayout, Groups, half_powers, strips
from foretoken.models.formats.weight_files import StoredTensors

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the four bits of a word that hold output 8 * word + i
_CHANNEL = 128  # inputs of a group if the file has one scale per output
_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_TRANSPOSED_PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, slots=True)
class PackedSettings:
    """Packing of a checkpoint's matrices."""

    method: str  # "compressed-tensors", "awq", "gptq" or "mxfp4"
    bits: int = 4  # bits of a code
    group: int = -1  # inputs that share a scale; -1 for all of an output's
    zero_shift: int = 0  # is added to the stored zeros (1 in GPTQ's version 1)
    symmetric: bool = False  # whether no zeros are stored (compressed-tensors)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A packed matrix [out, in] that is read by outputs."""

    shape: tuple[int, int]  # (out, in)
    layout: GroupLayout  # encoding of the codes, with a zero if every group has the same one, else with offsets
    codes: Callable[[int, int], Tensor]  # returns the codes of outputs ``first`` to ``last``, uint8 [last - first, in]
    scales: Tensor  # float32 [out, groups]
    zeros: Tensor | None = None  # uint8 [out, groups]; None if the layout has the zero
    group_of: Tensor | None = None  # the group of each input, if the groups are not consecutive; else None

    def grouped(self) -> Grouped | None:
        """Returns the matrix in groups; None if that would not be exact.

        Groups must be consecutive, of a multiple of 16 inputs. Scales of sixteen bits times codes are exact in
        float32, so a zero can be an offset; other scales are not.
        """
        scales, zeros, group = self.scales, self.zeros, self.layout.group
        if self.group_of is not None or (zeros is not None and not _short(scales)):
            return None
        split = 1
        if scales.shape[1] == 1:
            split, group = -(-self.shape[1] // _CHANNEL), _CHANNEL
        elif group % _CHANNEL == 0:
            split, group = group // _CHANNEL, _CHANNEL
        if group % 16:
            return None
        layout = GroupLayout(
            self.layout.bits,
            group,
            self.layout.zero,
            self.layout.levels,
            offsets=zeros is not None,
            half=zeros is None and torch.equal(scales.half().float(), scales),
        )
        groups = -(-self.shape[1] // group)

        def rows(first: int, last: int) -> Groups:
            scale = scales[first:last]
            offsets = None if zeros is None else -(zeros[first:last] * scale)
            by_group = [None if n is None else n.repeat_interleave(split, 1)[:, :groups] for n in (scale, offsets)]
            assert by_group[0] is not None
            return Groups(self.codes(first, last), by_group[0], by_group[1])

        return Grouped(self.shape, layout, rows)

    def dequantize(self) -> Tensor:
        values = torch.empty(self.shape)
        groups = torch.arange(self.shape[1]) // self.layout.group if self.group_of is None else self.group_of
        for first, last in strips(self.shape):
            codes = self.codes(first, last)
            if self.layout.levels is not None:
                codes = torch.tensor(self.layout.levels)[codes.long()]
            zeros: Tensor | int = self.layout.zero
            if self.zeros is not None:
                zeros = self.zeros[first:last].float()[:, groups]
            values[first:last] = (codes.float() - zeros) * self.scales[first:last][:, groups]
        return values


class PackedWeights(StoredTensors):
    """A checkpoint's tensors, with packed matrices under the names of plain ones, dequantized to float32.

    weights: the stored tensors.
    """

    def __init__(self, weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], s: PackedSettings) -> None:
        self._weights, self._settings, self.files = weights, s, getattr(weights, "files", ())
        suffix = {"compressed-tensors": ".weight_packed", "mxfp4": "_blocks"}.get(s.method, ".qweight")
        endings = {"mxfp4": ("_blocks", "_scales")}.get(s.method, tuple(f".{p}" for p in (*_PARTS, *_TRANSPOSED_PARTS)))
        stems = [name.removesuffix(suffix) for name in shapes if name.endswith(suffix)]
        hidden = {stem + part for stem in stems for part in endings}
        self._stems = {stem if s.method == "mxfp4" else f"{stem}.weight": stem for stem in stems}
        plain = {name: shape for name, shape in shapes.items() if name not in hidden}
        self.shapes = plain | {name: self._matrix(name).shape for name in self._stems}

    def __getitem__(self, name: str) -> Tensor:
        return self._matrix(name).dequantize() if name in self._stems else self._weights[name]

    @property
    def bits(self) -> float:
        """Bits of a weight, with its fraction of a scale and a zero of 32 bits each."""
        group = _CHANNEL if self._settings.group == -1 else self._settings.group
        return self._settings.bits + 64 / group

    @property
    def quantized(self) -> bool:
        return bool(self._stems)

    def grouped(self, name: str) -> Grouped | None:
        """Returns a packed matrix; None if the tensor is not packed, or only its dequantized values are exact."""
        return self._matrix(name).grouped() if name in self._stems else None

    def _matrix(self, name: str) -> PackedMatrix:
        stem = self._stems[name]
        try:
            return _READERS[self._settings.method](self._weights, stem, self._settings)
        except (KeyError, RuntimeError, IndexError, ValueError) as error:
            raise ModelLoadError(
                f"the packed matrix {stem!r} is not complete, or its parts do not belong together ({error}); its "
                f"checkpoint says {self._settings}"
            ) from None


def _compressed(weights: Mapping[str, Tensor], stem: str, s: PackedSettings) -> PackedMatrix:
    name = f"{stem}.weight_packed"
    out, inputs = (int(size) for size in weights[f"{stem}.weight_shape"])
    packed, scales = weights[name], weights[f"{stem}.weight_scale"]
    _check_words(packed)
    _require(tuple(packed.shape) == (out, -(-inputs * s.bits // 32)), f"weight_shape {(out, inputs)}, {packed.shape}")
    group = inputs if s.group == -1 else s.group
    _check_groups(scales.shape, (out, -(-inputs // group)))
    zeros = None
    if not s.symmetric:
        stored = weights[f"{stem}.weight_zero_point"]
        _check_groups(stored.shape, (-(-out * s.bits // 32), scales.shape[1]))
        zeros = _unpacked(stored.t(), s.bits)[:, :out].t()

    def codes(first: int, last: int) -> Tensor:
        return _unpacked(weights[name][first:last], s.bits)[:, :inputs]

    order = weights.get(f"{stem}.weight_g_idx")
    if order is not None and bool((order < 0).any()):
        order = None  # stored, but not used
    return _matrix((out, inputs), s.bits, group, codes, scales, zeros, order)


def _gptq(weights: Mapping[str, Tensor], stem: str, s: PackedSettings) -> PackedMatrix:
    """Reads a matrix as AutoGPTQ and GPTQModel pack it."""
    name = f"{stem}.qweight"
    packed, scales = weights[name], weights[f"{stem}.scales"]
    _check_words(packed)
    out, inputs = packed.shape[1], packed.shape[0] * 32 // s.bits
    group = inputs if s.group == -1 else s.group
    _check_groups(scales.shape, (-(-inputs // group), out))
    zeros = (_unpacked(weights[f"{stem}.qzeros"], s.bits) + s.zero_shift) & (2**s.bits - 1)
    _check_groups(zeros.shape, scales.shape)

    def codes(first: int, last: int) -> Tensor:
        return _unpacked(weights[name][:, first:last].t(), s.bits)

    return _matrix((out, inputs), s.bits, group, codes, scales.t(), zeros.t(), weights.get(f"{stem}.g_idx"))


def _awq(weights: Mapping[str, Tensor], stem: str, s: PackedSettings) -> PackedMatrix:
    """Reads a matrix as AutoAWQ packs it for its gemm kernels."""
    name = f"{stem}.qweight"
    packed, scales = weights[name], weights[f"{stem}.scales"]
    _check_words(packed)
    inputs, out = packed.shape[0], packed.shape[1] * 8
    group = inputs if s.group == -1 else s.group
    _check_groups(scales.shape, (-(-inputs // group), out))
    zeros = _awq_order(weights[f"{stem}.qzeros"])
    _check_groups(zeros.shape, scales.shape)

    def codes(first: int, last: int) -> Tensor:
        words = slice(first // 8, -(-last // 8))
        outputs = _awq_order(weights[name][:, words])[:, first % 8 : first % 8 + last - first]
        return outputs.t().contiguous()

    return _matrix((out, inputs), 4, group, codes, scales.t(), zeros.t(), None)


def _mxfp4(weights: Mapping[str, Tensor], stem: str, s: PackedSettings) -> PackedMatrix:
    """Reads a matrix as gpt-oss stores it; matrices of several experts are concatenated along outputs."""
    blocks, exponents = weights[f"{stem}_blocks"], weights[f"{stem}_scales"]
    _require(blocks.dtype == exponents.dtype == torch.uint8, "blocks and scales should be bytes")
    _require(blocks.shape[:-1] == exponents.shape and blocks.shape[-1] == 16, f"{blocks.shape}, {exponents.shape}")
    blocks = blocks.flatten(0, -3)
    out, inputs = blocks.shape[0], blocks.shape[1] * 32

    def codes(first: int, last: int) -> Tensor:
        read = blocks[first:last].flatten(1)
        return torch.stack((read & 15, read >> 4), -1).flatten(1)

    scales = torch.from_numpy(half_powers(exponents.reshape(out, -1).numpy()))
    return PackedMatrix((out, inputs), MXFP4, codes, scales)


_READERS: dict[str, Callable[[Mapping[str, Tensor], str, PackedSettings], PackedMatrix]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}


def _matrix(
    shape: tuple[int, int],
    bits: int,
    group: int,
    codes: Callable[[int, int], Tensor],
    scales: Tensor,
    zeros: Tensor | None,
    group_of: Tensor | None,
) -> PackedMatrix:
    """Returns a matrix of linear codes; zeros that are all in the middle, and groups in order, are omitted."""
    middle = 2 ** (bits - 1)
    if group_of is not None:
        group_of = group_of.long()
        _require(group_of.shape == (shape[1],), f"{group_of.shape} inputs have a group, of {shape[1]}")
        _require(bool(((group_of >= 0) & (group_of < scales.shape[1])).all()), "an input has a group that is not there")
        if torch.equal(group_of, torch.arange(shape[1]) // group):
            group_of = None
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    layout = GroupLayout(bits, group, middle if zeros is None else 0)
    return PackedMatrix(shape, layout, codes, scales.float(), zeros, group_of)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the codes in int32 words [rows, words], the lowest bits first: uint8 [rows, words * 32 / bits]."""
    _check_words(words)
    read = words.contiguous().view(torch.uint8)
    return read if bits == 8 else torch.stack((read & 15, read >> 4), -1).flatten(1)


def _awq_order(words: Tensor) -> Tensor:
    """Returns the codes of words [rows, words] of eight outputs each, uint8 [rows, words * 8]."""
    return _unpacked(words, 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)


def _short(scales: Tensor) -> bool:
    """Returns whether all scales are numbers of float16 or bfloat16, so that their products with codes are exact."""
    return any(torch.equal(scales.to(dtype).float(), scales) for dtype in (torch.float16, torch.bfloat16))


def _check_groups(shape: Any, expected: Any) -> None:
    _require(tuple(shape) == tuple(expected), f"{tuple(shape)} scales or zeros, where {tuple(expected)} are expected")


def _check_words(words: Tensor) -> None:
    _require(words.dtype == torch.int32 and words.ndim == 2, f"{words.dtype} {tuple(words.shape)} instead of int32")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(shortened(what))
