"""Writes a checkpoint as a GGUF file, which llama.cpp loads: types, keys and tensors are those of its tools."""

from __future__ import annotations

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
from foretoken.models.formats.gguf.blocks import FLOATS
from foretoken.models.formats.gguf.families import FAMILIES, GGUFFamily, config_of
from foretoken.models.formats.gguf.header import Header, StoredTensor
from foretoken.models.formats.gguf.mixtures import MIXTURES, tensor_type
from foretoken.models.formats.gguf.positions import ROPE_FACTORS
from foretoken.models.formats.gguf.settings import (
    WRITTEN,
    add_settings,
    check_same,
    rope_factors,
    stored_rows,
)
from foretoken.models.formats.gguf.tensor_names import Names
from foretoken.models.formats.gguf.tokenizer import gguf_tokenizer
from foretoken.models.formats.gguf.vocabulary import PROBES, add_tokenizer
from foretoken.models.formats.grouped import strips
from foretoken.quantize.ggml import to_blocks
from foretoken.quantize.rounding import Rounding

_QUANTIZATION_VERSION = 2  # of ggml's blocks


@dataclass(frozen=True, slots=True)
class Described:
    """Description of a model in a GGUF file: all but its tensors.

    Attributes:
        config: config.json.
        architecture: its architecture.
        name: the name in GGUF.
        tokenizer: the tokenizer, or None for a file without.
        ends: ids of the tokens that end a text.
        title: name of the model.
    """

    config: Mapping[str, Any]
    architecture: Architecture
    name: str
    tokenizer: Any
    ends: Sequence[int]
    title: str

    @staticmethod
    def of(config: Mapping[str, Any], tokenizer: Any, ends: Sequence[int], title: str) -> Described:
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
        """Names in the checkpoint by names in GGUF."""
        return Names.of(self.architecture, self.family.renamed)

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Adds all keys, and the tensor of rotary factors."""
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

    def finish(self) -> None:
        """Does nothing: all tensors are written."""

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
    """Returns the values of ``encoded`` data, float32."""
    if kind in FLOATS:
        return torch.from_numpy(data).view(FLOATS[kind]).float()
    return torch.from_numpy(gguf.dequantize(data, kind))


def _write_header(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
