"""Writes a checkpoint as a GGUF file, which llama.cpp loads: types, keys and tensors are those of its tools.

Matrices are quantized to a grid for each type, with codes to the nearest or by GPTQ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.families.architecture import Architecture, supports
from foretoken.models.formats.gguf.blocks import FLOATS, LAYOUTS, PACKED, BlockNumbers, Bytes, packed
from foretoken.models.formats.gguf.families import FAMILIES, GGUFFamily, config_of
from foretoken.models.formats.gguf.fields import ROPE_FACTORS
from foretoken.models.formats.gguf.header import Header, StoredTensor
from foretoken.models.formats.gguf.settings import (
    MIXTURES,
    WRITTEN,
    add_settings,
    check_same,
    rope_factors,
    stored_rows,
    tensor_type,
)
from foretoken.models.formats.gguf.tensor_names import Names
from foretoken.models.formats.gguf.tokenizer import gguf_tokenizer
from foretoken.models.formats.gguf.vocabulary import PROBES, add_tokenizer
from foretoken.models.formats.quantize import strips
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
    return numbers.half().float()


_QUANTIZATION_VERSION = 2  # of ggml's blocks


@dataclass(frozen=True, slots=True)
class Described:
    """Description of a model in a GGUF file: all but its tensors."""

    config: Mapping[str, Any]  # config.json
    architecture: Architecture
    name: str  # the name in GGUF
    tokenizer: Any  # the tokenizer, or None for a file without
    ends: Sequence[int]  # ids of the tokens that end a text
    title: str  # name of the model

    @staticmethod
    def of(config: Mapping[str, Any], tokenizer: Any, ends: Sequence[int], title: str) -> "Described":
        """Returns the description of a checkpoint. Raises InvalidRequest if GGUF has no such architecture here."""
        kind = config.get("model_type")
        name = WRITTEN.get(str(kind))
        if name is None or not supports(config):
            raise InvalidRequest(
                f"models of the type {kind!r} are not written as GGUF; known: {', '.join(sorted(WRITTEN))}"
            )
        return Described(config, Architecture.of(config), name, tokenizer, ends, title)

    @property
    def family(self) -> GGUFFamily:
        return FAMILIES[self.name]

    @property
    def names(self) -> Names:
        return Names.of(self.architecture, self.family.renamed)

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_type("model")
        writer.add_name(self.title)
        add_settings(writer, self.config, self.architecture)
        if self.tokenizer is not None:
            add_tokenizer(writer, self.tokenizer, self.ends, self.architecture.vocab)

    def check(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
        """Raises InvalidRequest unless the written architecture and tokenizer are read back unchanged."""
        file = folder / "keys.gguf"
        writer = gguf.GGUFWriter(file, self.name)
        self.add_to(writer)
        factors = rope_factors(self.config, self.architecture)
        if factors is not None:
            writer.add_tensor(ROPE_FACTORS, factors)
        _write_header(writer)
        writer.write_tensors_to_file()
        writer.close()
        header = Header.read(file)
        stored = config_of(replace(header, tensors={**tensors, **header.tensors}))
        check_same(self.architecture, Architecture.of(stored))
        if self.tokenizer is not None:
            read = gguf_tokenizer(header)
            for text in PROBES:
                expected, other = self.tokenizer.encode(text), read.encode(text)
                if expected != other:
                    raise InvalidRequest(
                        "a GGUF file cannot describe this model's tokenizer: of "
                        f"{text[:30]!r} it would make {other[:8]} instead of {expected[:8]}; choose int8 or int4"
                    )


class FileWriter:
    """Writes tensors in the order in which they were announced.

    Args:
        mixture: a name of ``MIXTURES``.
        shapes: shapes of the tensors by their names in the checkpoint, in their order.
    """

    def __init__(self, path: Path, described: Described, mixture: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._described, self._names = described, described.names
        self._writer = writer = gguf.GGUFWriter(path, described.name)
        described.add_to(writer)
        writer.add_file_type(MIXTURES[mixture].file_type)
        writer.add_quantization_version(_QUANTIZATION_VERSION)
        self._tensors = planned(described, mixture, shapes)
        factors = rope_factors(described.config, described.architecture)
        if factors is not None:
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        for tensor in self._tensors.values():
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.kind
            )
        _write_header(writer)
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)

    def put(self, name: str, tensor: Tensor, rounding: Rounding) -> Tensor:
        """Writes a tensor. Returns its values as they are read back."""
        d = self._described
        kind = self._tensors[self._names.stored(name)].kind
        data = encoded(tensor, kind, rounding)
        rows = stored_rows(d.family, d.architecture, name, torch.from_numpy(data))
        self._writer.write_tensor_data(np.ascontiguousarray(rows.numpy()))
        return decoded(data, kind)

    def close(self) -> None:
        self._writer.close()


def planned(described: Described, mixture: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name, with their types. Raises InvalidRequest for a name without a form."""
    tied = "lm_head.weight" not in shapes
    names, tensors = described.names, {}
    for tensor, shape in shapes.items():
        try:
            name = names.stored(tensor)
        except KeyError:
            raise InvalidRequest(
                f"the checkpoint has the tensor {tensor!r}, for which a GGUF file of {described.name} has no name"
            ) from None
        kind = tensor_type(mixture, name, shape, described.architecture.layers, tied)
        block, size = GGML_QUANT_SIZES[kind]
        tensors[name] = StoredTensor(name, kind, shape, 0, int(np.prod(shape)) // block * size, Path())
    return tensors


def encoded(tensor: Tensor, kind: GGMLQuantizationType, rounding: Rounding) -> NDArray[Any]:
    """Returns a tensor in a type of GGUF: bytes [out, bytes of a row], or floats."""
    if kind in FLOATS:
        floats = tensor.to(FLOATS[kind])
        return floats.view(torch.int16).numpy() if floats.dtype == torch.bfloat16 else floats.numpy()
    if rounding.curvature is not None:
        return to_blocks(tensor.float(), kind, rounding)
    pieces = strips((tensor.shape[0], tensor.shape[1]))
    return np.concatenate([to_blocks(tensor[first:last].float(), kind, rounding) for first, last in pieces])


def decoded(data: NDArray[Any], kind: GGMLQuantizationType) -> Tensor:
    if kind in FLOATS:
        return torch.from_numpy(data).view(FLOATS[kind]).float()
    return torch.from_numpy(gguf.dequantize(data, kind))


def _write_header(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
