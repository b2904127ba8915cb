"""Packed weights as a file: all memory that a ``ModelSpec`` points to, with pointers as offsets in the file.

A file has a head of one page, the blocks of memory, each aligned to a page, and a directory in JSON: positions and
checksums of the blocks, and the targets of their pointers. The head holds the position and the SHA-256 of the
directory.
It works for any structure whose pointers are declared in ``bindings.py``.
"""

import ctypes
import hashlib
import json
import mmap
import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from foretoken.models.runners.native.bindings import LayerSpec, ModelSpec
from foretoken.models.runners.native.build import packing_library

ALIGNMENT = 4096
_MAGIC = b"FTWEIGH2"
_HEAD = struct.Struct("<8sQQ32s")  # magic, offset and size of the directory, its SHA-256
_WORD = struct.Struct("<Q")
_AT_ONCE = 2**23  # bytes read or written at once


class DamagedImage(Exception):
    """A file is no file of packed weights, truncated or damaged. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """Memory at an address. ``kind``: its type, if it is a structure or an array of structures."""

    address: int
    size: int
    kind: Any = None


class _Memory:
    """Finds the block that a pointer points to; the arguments are those of ``WeightImage``."""

    def __init__(self, spec: ModelSpec, allocated: Iterable[tuple[int, int]], held: Iterable[object]) -> None:
        blocks = [MemoryBlock(*place) for place in allocated]
        blocks += [MemoryBlock(t.data_ptr(), t.nbytes) for t in held if isinstance(t, Tensor)]
        structures = [(s, type(s)) for s in (spec, *held) if isinstance(s, ctypes.Structure)]
        blocks += [MemoryBlock(ctypes.addressof(s), ctypes.sizeof(s), kind) for s, kind in structures]
        layers = LayerSpec * spec.layer_count
        if spec.layers:
            blocks.append(MemoryBlock(ctypes.addressof(spec.layers.contents), ctypes.sizeof(layers), layers))
        self._blocks = sorted(blocks, key=lambda block: block.address)
        self._starts = [block.address for block in self._blocks]

    def at(self, address: int) -> MemoryBlock:
        """Returns the block with this address. Raises LookupError if there is none."""
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._blocks[index].address + self._blocks[index].size:
            return self._blocks[index]
        raise LookupError(f"no block at {address:#x}")


class WeightImage:
    """The memory of a model, for writing to a file.

    Args:
        spec: the specification of the model; only pointers to memory that does not change may be set.
        allocated: address and size of each allocation that it points to, directly or not.
        held: tensors and structures that it points to.
    """

    def __init__(self, spec: ModelSpec, allocated: Iterable[tuple[int, int]], held: Iterable[object]) -> None:
        self._held = tuple(held), spec
        spec = self._spec = ModelSpec.from_buffer_copy(spec)  # the runner changes the original
        blocks = _Memory(spec, allocated, self._held[0])
        root = blocks.at(ctypes.addressof(spec))
        self._blocks, self._pointers = [root], []
        numbers = {root.address: 0}
        for block in self._blocks:  # grows during the iteration
            for place in _pointers(block):
                target = blocks.at(value := _WORD.unpack(ctypes.string_at(place, 8))[0])
                if target.address not in numbers:
                    numbers[target.address] = len(self._blocks)
                    self._blocks.append(target)
                source = numbers[block.address]
                to = numbers[target.address]
                self._pointers.append((source, place - block.address, to, value - target.address))
        self._copies = [_without_pointers(block) for block in self._blocks]

    @property
    def nbytes(self) -> int:
        return sum(-(-block.size // ALIGNMENT) * ALIGNMENT for block in self._blocks) + ALIGNMENT

    def write(self, file: BinaryIO, threads: int = 1) -> None:
        """Writes the file. Raises OSError."""
        file.write(bytes(ALIGNMENT))
        places = []
        for block, copy in zip(self._blocks, self._copies, strict=True):
            address = block.address if copy is None else ctypes.addressof(copy)
            places.append((file.tell(), block.size, f"{_checksum(address, block.size, threads):016x}"))
            for at in range(0, block.size, _AT_ONCE):
                size = min(_AT_ONCE, block.size - at)
                file.write(memoryview((ctypes.c_uint8 * size).from_address(address + at)).cast("B"))
            file.write(bytes(-block.size % ALIGNMENT))
        directory = json.dumps({"blocks": places, "pointers": self._pointers}).encode()
        at = file.tell()
        file.write(directory)
        file.seek(0)
        file.write(_HEAD.pack(_MAGIC, at, len(directory), hashlib.sha256(directory).digest()))


@dataclass(frozen=True, slots=True, eq=False)
class OpenImage:
    """A model's memory from a file."""

    spec: ModelSpec  # the specification; it points into ``memory``
    memory: tuple[object, ...]  # memory that must outlive it


def open_image(path: Path) -> OpenImage:
    """Maps a file into memory, read-only, and checks all of it.

    Raises:
        OSError: it cannot be read.
        DamagedImage: it differs from the written file.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size < ALIGNMENT:
            raise DamagedImage(f"it has {size} bytes")
        _read_ahead(file, size)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapped, np.uint8)
    places, pointers = _directory(mapped)
    base, threads = view.ctypes.data, torch.get_num_threads()
    for at, length, checksum in places:
        if not ALIGNMENT <= at <= at + length <= size or at % ALIGNMENT:
            raise DamagedImage("a block lies outside of it")
        if f"{_checksum(base + at, length, threads):016x}" != checksum:
            raise DamagedImage("a checksum differs")
    changed = {source for source, *_ in pointers} | {0}
    copies = {n: ctypes.create_string_buffer(mapped[places[n][0] : places[n][0] + places[n][1]]) for n in changed}
    starts = [ctypes.addressof(copies[n]) if n in copies else base + place[0] for n, place in enumerate(places)]
    for source, at, target, offset in pointers:
        if not 0 <= at <= places[source][1] - 8 or not 0 <= offset < places[target][1]:
            raise DamagedImage("a pointer leaves its block")
        _WORD.pack_into(copies[source], at, starts[target] + offset)
    if places[0][1] != ctypes.sizeof(ModelSpec):
        raise DamagedImage("its model has another form")
    return OpenImage(ModelSpec.from_buffer_copy(copies[0]), (view, mapped, copies))


def _read_ahead(file: BinaryIO, size: int) -> None:
    """Reads a file to the end, so that the system caches it in large pages; page faults would read small ones.

    Cached parts are not read again.
    """
    for at in range(0, size, _AT_ONCE):
        if not all(_in_memory(file, place) for place in (at, min(at + _AT_ONCE, size) - 1)):
            file.seek(at)
            file.read(_AT_ONCE)


def _in_memory(file: BinaryIO, at: int) -> bool:
    """Returns whether the page cache holds a byte of a file; False if that is unknown."""
    try:
        return os.preadv(file.fileno(), [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except (AttributeError, OSError):
        return False


def _directory(mapped: mmap.mmap) -> tuple[Sequence[tuple[int, int, str]], Sequence[tuple[int, int, int, int]]]:
    magic, at, length, digest = _HEAD.unpack_from(mapped)
    text = mapped[at : at + length]
    if magic != _MAGIC or at + length != len(mapped) or hashlib.sha256(text).digest() != digest:
        raise DamagedImage("its directory differs from the written one")
    content = json.loads(text)
    return content["blocks"], content["pointers"]


def _checksum(address: int, size: int, threads: int) -> int:
    return packing_library().checksum(address, size, threads)


def _pointers(block: MemoryBlock) -> Iterator[int]:
    """Yields the addresses of all pointers in a block that are not null."""
    for place in [] if block.kind is None else _places(block.kind, block.address):
        if any(ctypes.string_at(place, 8)):
            yield place


def _without_pointers(block: MemoryBlock) -> ctypes.Array[ctypes.c_char] | None:
    """Returns a copy of a block without its pointers, so that equal weights make equal files; None if it has none."""
    if block.kind is None:
        return None
    copy = ctypes.create_string_buffer(ctypes.string_at(block.address, block.size), block.size)
    for place in _places(block.kind, block.address):
        _WORD.pack_into(copy, place - block.address, 0)
    return copy


def _places(kind: Any, address: int) -> Iterator[int]:
    """Yields the addresses of all pointers of a type."""
    if issubclass(kind, ctypes.Array):
        for number in range(kind._length_):
            yield from _places(kind._type_, address + number * ctypes.sizeof(kind._type_))
    elif issubclass(kind, ctypes.Structure):
        for name, inner, *_ in kind._fields_:
            yield from _places(inner, address + getattr(kind, name).offset)
    elif kind is ctypes.c_void_p or hasattr(kind, "contents"):
        yield address
