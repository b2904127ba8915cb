"""The header of a GGUF file: metadata, and positions of tensors.

Every count, length and offset is compared with the file's size before it is used, so a damaged or hostile header gives
an error and never memory beyond the file. Arrays (a vocabulary has 100,000 strings) are decoded on access. The format
is described in ggml's ``docs/gguf.md``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import shortened
from foretoken.models.formats.gguf import SPLIT_NAME
from foretoken.models.formats.gguf.cursor import Cursor, StoredArray, damaged, mapped

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS, MAX_TENSORS, MAX_PARTS = 2**16, 2**18, 2**12
MAX_NAME = 2**10  # bytes of a key or of a tensor's name
MAX_ALIGNMENT = 2**20
_ALIGNMENT = 32  # of the tensors' data, without general.alignment

_T = GGUFValueType


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Position of a tensor in the file."""

    name: str
    kind: GGMLQuantizationType  # its storage type
    shape: tuple[int, ...]  # rows first, as torch counts dimensions
    start: int  # offset in the file
    nbytes: int  # length in bytes
    path: Path  # the file, one of several if the model is split

    def rows(self, name: str, first: int, last: int) -> "StoredTensor":
        """Returns rows, or elements of a vector, as a tensor of this name."""
        width = self.nbytes // self.shape[0]
        shape = (last - first, *self.shape[1:])
        return StoredTensor(name, self.kind, shape, self.start + first * width, (last - first) * width, self.path)


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """The metadata and the table of tensors of a GGUF file."""

    path: Path  # the file; the first one of a split model
    metadata: dict[str, Any]  # values by key; arrays as ``StoredArray``
    tensors: dict[str, StoredTensor]  # tensors by name, those of all files

    @staticmethod
    def read(path: Path) -> "Header":
        """Reads and checks a file's header; the headers of the last few files are kept.

        The first file of a split model (``split.count``) stands for all.
        """
        header = _of_file(path)
        parts = split_parts(header)
        return header if len(parts) == 1 else _joined(header, [_of_file(part) for part in parts[1:]])

    def array(self, key: str) -> list[Any] | None:
        """Returns the elements of an array; None if the file has no such key."""
        stored = self.metadata.get(key)
        if stored is None:
            return None
        if not isinstance(stored, StoredArray):
            raise damaged(self.path, f"{key} is {shortened(stored)}; expected an array")
        with mapped(self.path) as content:
            cursor = Cursor(self.path, content, stored.start)
            if stored.kind == _T.STRING:
                return cursor.strings(stored.count)
            return cursor.numbers(stored.kind, stored.count)


def split_parts(header: Header) -> list[Path]:
    """Returns the files of a model in order, by llama.cpp's convention for their names."""
    count, number = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
    if not isinstance(count, int) or not 0 <= count <= MAX_PARTS:
        raise damaged(header.path, f"split.count is {shortened(count)}; expected at most {MAX_PARTS}")
    if count < 2:
        return [header.path]
    name = SPLIT_NAME.fullmatch(header.path.name)
    if name is None or int(name[3]) != count:
        raise ModelLoadError(
            f"{header.path} is one of {count} parts; expected a name like model-00001-of-{count:05}.gguf"
        )
    parts = [header.path.with_name(f"{name[1]}-{part + 1:05}-of-{count:05}.gguf") for part in range(count)]
    if number != 0 or header.path != parts[0]:
        raise ModelLoadError(f"{header.path} is not the first of the {count} parts of its model; name {parts[0]}")
    if missing := [part for part in parts if not part.is_file()]:
        raise ModelLoadError(f"{header.path} is one of {count} parts, and {missing[0].name} is not beside it")
    return parts


def _joined(first: Header, others: list[Header]) -> Header:
    """Returns the header of a model in several files."""
    tensors = dict(first.tensors)
    for number, header in enumerate(others, 1):
        if (header.metadata.get("split.no"), header.metadata.get("split.count")) != (number, len(others) + 1):
            raise damaged(header.path, f"it is not part {number + 1} of {first.path.name}")
        if twice := tensors.keys() & header.tensors.keys():
            raise damaged(header.path, f"the tensor {shortened(min(twice))} is in another part as well")
        tensors |= header.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise damaged(first.path, f"its parts have {len(tensors)} tensors, and it claims {shortened(total)}")
    return Header(first.path, first.metadata, tensors)


def _of_file(path: Path) -> Header:
    try:
        status = path.stat()
        return _read(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path} cannot be read ({error.strerror or error})") from None


@lru_cache(maxsize=16)
def _read(path: Path, size: int, modified: int) -> Header:
    """Reads a header. ``size`` and ``modified`` are part of the cache's key, so a changed file is read again."""
    if size < 24:
        raise damaged(path, f"it has {size} bytes, fewer than a header")
    with mapped(path) as content:
        cursor = Cursor(path, content, 0)
        if content[:4] != MAGIC:
            raise ModelLoadError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        cursor.at = 4
        version = cursor.number(_T.UINT32)
        if version not in VERSIONS:
            order = "; it is big-endian" if version & 0xFFFF == 0 else ""
            raise ModelLoadError(f"{path} has version {version} of GGUF{order}; supported are 2 and 3, little-endian")
        tensors, keys = cursor.number(_T.UINT64), cursor.number(_T.UINT64)
        for name, count, limit in (("keys", keys, MAX_KEYS), ("tensors", tensors, MAX_TENSORS)):
            if count > limit:
                raise damaged(path, f"it claims {count} {name}; supported are {limit}")
        metadata = dict(_metadata(cursor, keys))
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise damaged(path, f"general.alignment is {shortened(alignment)}; expected a power of two")
        infos = [_tensor(cursor) for _ in range(tensors)]
        data = -(-cursor.at // alignment) * alignment
    placed = [replace(info, start=info.start + data) for info in infos]
    _check_positions(path, placed, alignment, size)
    return Header(path, metadata, {tensor.name: tensor for tensor in placed})


def _metadata(cursor: Cursor, count: int) -> Iterator[tuple[str, Any]]:
    seen = set()
    for _ in range(count):
        key = cursor.string(MAX_NAME)
        if key in seen:
            raise damaged(cursor.path, f"it has the key {shortened(key)} twice")
        seen.add(key)
        yield key, cursor.value(cursor.kind())


def _tensor(cursor: Cursor) -> StoredTensor:
    """Reads one entry of the table of tensors; ``start`` counts from the beginning of the data."""
    name = cursor.string(MAX_NAME)
    dimensions = cursor.number(_T.UINT32)
    if not 1 <= dimensions <= 4:
        raise damaged(cursor.path, f"the tensor {shortened(name)} has {dimensions} dimensions; expected 1 to 4")
    shape = tuple(reversed(cursor.numbers(_T.UINT64, dimensions)))
    number = cursor.number(_T.UINT32)
    try:
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelLoadError(
            f"{cursor.path} stores {shortened(name)} in a type of number {number}, which is not known; a newer version "
            "of the package 'gguf' may know it"
        ) from None
    if min(shape) < 1 or shape[-1] % block:
        raise damaged(
            cursor.path, f"the tensor {shortened(name)} has the shape {shape}, which {kind.name} does not divide"
        )
    return StoredTensor(name, kind, shape, cursor.number(_T.UINT64), math.prod(shape) // block * size, cursor.path)


def _check_positions(path: Path, tensors: list[StoredTensor], alignment: int, size: int) -> None:
    """Raises ModelLoadError unless all tensors lie within the file, are aligned, and neither overlap nor repeat."""
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise damaged(path, "it has two tensors of one name")
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if tensor.start + tensor.nbytes > size:
            raise damaged(
                path,
                f"the tensor {shortened(tensor.name)} ends at {tensor.start + tensor.nbytes}, beyond the file's "
                f"{size} bytes",
            )
        if tensor.start % alignment or tensor.start < end:
            raise damaged(path, f"the tensor {shortened(tensor.name)} lies on another one or is not aligned")
        end = tensor.start + tensor.nbytes
