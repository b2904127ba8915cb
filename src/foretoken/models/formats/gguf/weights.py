"""The tensors of a GGUF file by their names in a checkpoint, dequantized or as groups of codes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import shortened
from foretoken.models.formats.finite import check_finite
from foretoken.models.formats.gguf.blocks import FLOATS, LAYOUTS, Bytes, groups_of
from foretoken.models.formats.gguf.families import checkpoint_name, config_of, family_of
from foretoken.models.formats.gguf.header import Header, StoredTensor, split_parts
from foretoken.models.formats.grouped import Grouped, Groups, TwoLevels


@dataclass(frozen=True, slots=True)
class _Source:
    """A stored tensor and how it differs from the checkpoint's.

    Attributes:
        heads: number of heads whose rows are interleaved; 0 for none.
        offset: is subtracted from the stored values.
    """

    stored: StoredTensor
    heads: int = 0
    offset: float = 0.0


class GGUFWeights(Mapping[str, Tensor]):
    """The tensors of a GGUF file under the checkpoint's names, with llama.cpp's changes undone.

    Tensors are read when they are asked for, piece by piece, so nothing stays resident: floats in the type of the file,
    quantized ones as float32.

    Attributes:
        shapes: the shape of each tensor by name, known without reading it.
        files: the file, or all parts of the model.

    Raises:
        ModelLoadError: the file is damaged, or has tensors or types that are not supported.
    """

    def __init__(self, path: Path) -> None:
        header = Header.read(path)
        self._path = path
        self.files = tuple(split_parts(header))
        self._sources = _sources(header)
        self.shapes = {name: source.stored.shape for name, source in self._sources.items()}

    def __getitem__(self, name: str) -> Tensor:
        source, grouped = self._sources[name], self.grouped(name)
        if grouped is not None:
            tensor = grouped.dequantize().reshape(source.stored.shape)
        else:
            tensor = _floats(source, self._rows(source, 0, _row_count(source)))
        check_finite(name, tensor, str(self._path))
        return tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(source.stored.nbytes for source in self._sources.values())

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def grouped(self, name: str) -> Grouped | None:
        """Returns a quantized matrix that reads its rows from the file; None if the tensor holds floats.

        Matrices of several experts lie below each other.
        """
        source = self._sources[name]
        kind, shape = source.stored.kind, source.stored.shape
        if kind not in LAYOUTS or source.offset or len(shape) < 2:
            return None

        def rows(first: int, last: int) -> Groups:
            groups = groups_of(kind, self._rows(source, first, last))
            for numbers in (groups.scales, groups.offsets):
                if numbers is not None:
                    check_finite(name, numbers.wholes if isinstance(numbers, TwoLevels) else numbers, str(self._path))
            return groups

        return Grouped((_row_count(source), shape[-1]), LAYOUTS[kind], rows)

    def _rows(self, source: _Source, first: int, last: int) -> Bytes:
        """Returns the bytes [last - first, bytes of a row] of a tensor's rows, in the checkpoint's order."""
        stored = source.stored
        count = _row_count(source)
        width = stored.nbytes // count
        order = _order(count, source.heads)
        try:
            if order is None:
                start, size = stored.start + first * width, (last - first) * width
                return np.fromfile(stored.path, np.uint8, size, offset=start).reshape(last - first, width)
            return np.memmap(stored.path, np.uint8, "c", stored.start, (count, width))[order[first:last]]
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{stored.path} cannot be read ({error}); was it changed?") from None


def _row_count(source: _Source) -> int:
    shape = source.stored.shape
    return math.prod(shape[:-1]) if len(shape) > 1 else shape[0] if source.heads else 1


def _order(rows: int, heads: int) -> NDArray[np.int64] | None:
    """Returns the row in the file of each row of the checkpoint; None if they are the same."""
    if not heads:
        return None
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _floats(source: _Source, rows: Bytes) -> Tensor:
    """Returns a tensor that is stored as floats."""
    tensor = torch.from_numpy(rows).view(FLOATS[source.stored.kind]).reshape(source.stored.shape)
    return tensor.float() - source.offset if source.offset else tensor


def _sources(header: Header) -> dict[str, _Source]:
    """Returns the file's tensors by their names in a checkpoint. Raises ModelLoadError for unsupported ones."""
    _, family = family_of(header)
    config = config_of(header)
    heads = {"self_attn.q_proj": config["num_attention_heads"]}
    heads["self_attn.k_proj"] = config["num_key_value_heads"] or config["num_attention_heads"]
    sources = {}
    for name, stored in header.tensors.items():
        try:
            known = checkpoint_name(family, name)
        except KeyError:
            raise ModelLoadError(
                f"{header.path} has the tensor {shortened(name)}, which its architecture does not have here"
            ) from None
        if known is None:
            continue
        _check_type(header.path, stored)
        offset = family.norm_offset if known.endswith("norm.weight") else 0.0
        part = known.rpartition(".")[0].split(".", 3)[-1]
        pairs = heads.get(part, 0) if family.interleaved else 0
        if pairs and (pairs < 1 or stored.shape[0] % (2 * pairs)):
            raise ModelLoadError(f"{header.path} has {name} {stored.shape}, which {pairs} heads do not divide")
        sources[known] = _Source(stored, pairs, offset)
    return sources


def _check_type(path: Path, stored: StoredTensor) -> None:
    """Raises ModelLoadError for a tensor whose type or number of dimensions is not supported."""
    vector, max_dimensions = len(stored.shape) == 1, 3 if "_exps." in stored.name else 2
    if len(stored.shape) > max_dimensions or (stored.kind not in FLOATS and (vector or stored.kind not in LAYOUTS)):
        raise ModelLoadError(
            f"{path} stores {stored.name} {stored.shape} as {stored.kind.name}; supported are vectors of "
            f"{', '.join(kind.name for kind in FLOATS)}, and matrices of these and {', '.join(k.name for k in LAYOUTS)}"
        )
