"""Weights packed into the order in which the compiled kernels read them, in aligned memory outside Python's heap."""

import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.formats.quantize import Grouped, Int8, TwoLevels, joinable, strips
from foretoken.models.formats.quantize import Matrix as AnyMatrix
from foretoken.models.formats.weights import LinearWeights, MatrixStack, NormWeight
from foretoken.models.runners.native.bindings import (
    LANES,
    TILE_STEPS,
    UNIT,
    Matrix,
    NormSpec,
    PackingFunctions,
    UpperBytes,
)
from foretoken.models.runners.native.build import Kind, ScaleKind, grouped_kind

CACHE_LINE = 64  # bytes
# Linux takes huge pages for whole multiples of 2 MiB alone, and no memory for what is not used.
CHUNK_BYTES = 2**25 if sys.platform == "linux" else 0


def padded(count: int, to: int) -> int:
    """Returns ``count`` rounded up to a multiple of ``to``."""
    return -(-count // to) * to


class Arena:
    """Memory of one runner, freed when the arena is garbage-collected.

    Args:
        library: Allocates.
        chunk: Bytes of the chunks from which smaller allocations are taken.

    Attributes:
        nbytes: Allocated bytes.
    """

    def __init__(self, library: PackingFunctions, chunk: int | None = None) -> None:
        self.library, self._chunk = library, CHUNK_BYTES if chunk is None else chunk
        self._held: dict[int, int] = {}  # sizes by address
        self._mapped: dict[int, int] = {}  # of whole mappings
        self._at = self._left = 0  # what is left of the last chunk
        self.nbytes = 0
        weakref.finalize(self, _free, library, self._mapped)

    def allocate(self, size: int) -> int:
        """Returns the address of ``size`` zeroed bytes. Raises MemoryError."""
        room = padded(max(size, 1), CACHE_LINE)
        if size > self._chunk // 2:
            address = self._map(size)
        else:
            if room > self._left:
                self._at, self._left = self._map(self._chunk), self._chunk
            address = self._at
            self._at, self._left = self._at + room, self._left - room
        self._held[address] = size
        self.nbytes += size
        return address

    def _map(self, size: int) -> int:
        address = self.library.foretoken_allocate(size)
        if not address:
            raise MemoryError(f"no memory for another {size / 2**20:.0f} MiB")
        self._mapped[address] = size
        return int(address)

    @property
    def held(self) -> tuple[tuple[int, int], ...]:
        """Address and size of each allocation."""
        return tuple(self._held.items())

    def free(self, address: int) -> None:
        """Frees memory that ``allocate`` returned."""
        size = self._held.pop(address)
        self.nbytes -= size
        if size > self._chunk // 2:
            self.library.foretoken_free(address, self._mapped.pop(address))
        else:
            discard(address, size)

    @staticmethod
    def copy(to: int, source: int, size: int) -> None:
        """Copies ``size`` bytes to the address ``to``."""
        ctypes.memmove(to, source, size)


def discard(address: int, size: int) -> None:
    """Returns the memory in a range of an arena to the system, which zeroes it. Keeps it where that cannot be done."""
    start, end = padded(address, mmap.PAGESIZE), (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _free(library: PackingFunctions, mapped: dict[int, int]) -> None:
    for address, size in mapped.items():
        library.foretoken_free(address, size)


WORD = 4  # bytes
PAIR_BYTES = 192  # bytes of two steps of a unit in 12 bits
MAX_RAW = 0.1  # maximum fraction of pairs with a rare upper byte of a matrix stored in 12 bits
KINDS = {torch.float32: Kind.FLOAT32, torch.bfloat16: Kind.BFLOAT16, torch.int8: Kind.INT8}


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix, the tensors that it points to, which must outlive it, and the bytes of all of it."""

    matrix: Matrix
    held: tuple[object, ...]
    nbytes: int


def pack(
    arena: Arena,
    parts: Sequence[AnyMatrix],
    bias: Tensor | None = None,
    interleave: bool = False,
    compress: bool = False,
) -> Packed:
    """Packs matrices [out, in] with the same inputs into one.

    Args:
        parts: all float32, all bfloat16, all int8, or all grouped in one layout. Several parts that are not interleaved
            have multiples of sixteen outputs.
        bias: [out], in the order of the parts.
        interleave: whether blocks of sixteen outputs alternate between the parts; otherwise the parts are concatenated.
        compress: whether bfloat16 is stored in 12 bits, without loss, if few of its exponents are rare.

    Raises:
        KernelsUnavailable: the parts are quantized, and the processor has no instruction for sums of int8.
    """
    blocks = [padded(part.shape[0], LANES) // LANES for part in parts]
    outputs = padded(sum(blocks) * LANES, UNIT)
    vectors = {}
    if bias is not None:
        vectors["bias"] = _by_output(bias.float().split([part.shape[0] for part in parts]), outputs, interleave)
    quantized = [part for part in parts if isinstance(part, Int8)]
    if quantized:
        vectors["scales"] = _by_output([part.scales for part in quantized], outputs, interleave)
        vectors["sums"] = _by_output([_sums(part.values) for part in quantized], outputs, interleave)
    placed = zip(parts, _places(blocks, interleave), strict=True)
    return _packed(arena, placed, outputs, vectors, compress)


def pack_stack(arena: Arena, stack: MatrixStack, compress: bool = False) -> Packed:
    """Packs the matrices of all experts into one, expert by expert.

    Args:
        stack: the experts. Blocks of sixteen outputs alternate between the parts of one expert. They are read one after
            the other, so that at most one is in memory twice.

    Raises:
        KernelsUnavailable: see ``pack``.
    """
    first = stack.read(0)
    blocks = padded(sum(padded(part.shape[0], LANES) for part in first), UNIT) // LANES
    vectors: dict[str, list[Tensor]] = {}

    def placed() -> Iterator[tuple[AnyMatrix, tuple[int, int]]]:
        for expert, parts in enumerate(_experts(stack, first)):
            for number, part in enumerate(parts):
                yield part, (expert * blocks + number, len(parts))
            quantized = [part for part in parts if isinstance(part, Int8)]
            if quantized:
                vectors.setdefault("scales", []).append(
                    _by_output([part.scales for part in quantized], blocks * LANES, True)
                )
                sums = _by_output([_sums(part.values) for part in quantized], blocks * LANES, True)
                vectors.setdefault("sums", []).append(sums)

    if stack.biases:
        vectors["bias"] = [
            _by_output([bias[expert].float() for bias in stack.biases], blocks * LANES, True)
            for expert in range(stack.count)
        ]
    return _packed(arena, placed(), stack.count * blocks * LANES, vectors, compress)


def _experts(stack: MatrixStack, first: tuple[AnyMatrix, ...]) -> Iterator[Sequence[AnyMatrix]]:
    """Yields the parts of each expert, all in one layout. ``first``: parts of the first one."""
    grouped = [part for part in first if isinstance(part, Grouped)]
    if not grouped or stack.quantized:
        yield first
        for expert in range(1, stack.count):
            yield stack.read(expert)
        return
    every = [part for expert in range(stack.count) for part in stack.read(expert)]  # nothing is read yet
    alike = joinable([part for part in every if isinstance(part, Grouped)])
    for at in range(0, len(alike), len(first)):
        yield alike[at : at + len(first)]


def _packed(
    arena: Arena,
    placed: Iterable[tuple[AnyMatrix, tuple[int, int]]],
    outputs: int,
    vectors: Mapping[str, Tensor | list[Tensor]],
    compress: bool,
) -> Packed:
    """Packs matrices of one kind into one.

    Args:
        placed: the matrices, each with its first block of sixteen outputs and the step between its blocks.
        outputs: number of all outputs.
        vectors: values by output, by the name of the field of ``Matrix``; complete when all are packed.
    """
    before = arena.nbytes
    upper: tuple[object, ...] = ()
    parts = iter(placed)
    first = next(parts)
    every = chain([first], parts)
    if isinstance(first[0], Grouped):
        matrix = _pack_groups(arena, first[0], every, outputs)
    else:
        smaller = compress and isinstance(first[0], Tensor) and first[0].dtype == torch.bfloat16
        # A huge page of which a part is freed is split, so raw weights are packed in memory of their own.
        place = Arena(arena.library, 0) if smaller else arena
        matrix = _pack_words(place, every, outputs)
        if smaller:
            upper = _compress(arena, matrix)
    held = {name: torch.cat(part) if isinstance(part, list) else part for name, part in vectors.items()}
    for name, tensor in held.items():
        setattr(matrix, name, tensor.data_ptr())
    kept = (*held.values(), *upper)
    beside = sum(item.nbytes for item in kept if isinstance(item, Tensor))
    return Packed(matrix, kept, arena.nbytes - before + beside)


def _places(blocks: Sequence[int], interleave: bool) -> list[tuple[int, int]]:
    """Returns each part's first block and the step between its blocks."""
    if interleave:
        return [(number, len(blocks)) for number in range(len(blocks))]
    return [(sum(blocks[:number]), 1) for number in range(len(blocks))]


def _pack_words(arena: Arena, placed: Iterable[tuple[AnyMatrix, tuple[int, int]]], outputs: int) -> Matrix:
    matrix = None
    for whole, (start, step) in placed:
        assert not isinstance(whole, Grouped)
        part = whole.values if isinstance(whole, Int8) else whole
        per_word = WORD // part.element_size()
        inputs = padded(part.shape[1], per_word)
        if matrix is None:
            steps = padded(inputs // per_word, TILE_STEPS)
            data = arena.allocate(outputs * steps * WORD)
            matrix = Matrix(data=data, units=outputs // UNIT, steps=steps, kind=KINDS[part.dtype])
        rows = F.pad(part, (0, inputs - part.shape[1])) if inputs != part.shape[1] else part.contiguous()
        source = rows.data_ptr(), rows.shape[0], inputs // per_word
        arena.library.foretoken_pack(*source, matrix.data, matrix.steps, start, step, torch.get_num_threads())
    assert matrix is not None
    return matrix


def _compress(arena: Arena, matrix: Matrix) -> tuple[object, ...]:
    """Moves a packed bfloat16 matrix to an arena, in 12 bits if few have a rare upper byte; see csrc/packed.hpp.

    Returns objects that the matrix points to; empty if it is unchanged.
    """
    threads, units, pairs = torch.get_num_threads(), matrix.units, matrix.units * matrix.steps // 2
    table, counts = torch.zeros(units, 16, dtype=torch.uint8), torch.zeros(units, dtype=torch.int32)
    arena.library.foretoken_choose_bytes(matrix, table.data_ptr(), counts.data_ptr(), threads)
    total = int(counts.sum())
    if total > MAX_RAW * pairs:
        size = matrix.units * UNIT * matrix.steps * WORD
        source, matrix.data = matrix.data, arena.allocate(size)
        arena.copy(matrix.data, source, size)
        return ()
    starts = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)).contiguous()
    raw, words = torch.zeros(max(total, 1), dtype=torch.int32), torch.empty(max(total, 1), 2 * UNIT, dtype=torch.int32)
    upper = UpperBytes(table.data_ptr(), starts.data_ptr(), raw.data_ptr(), words.data_ptr())
    data = arena.allocate(pairs * PAIR_BYTES)
    arena.library.foretoken_pack_bytes(matrix, data, upper, threads)
    matrix.data, matrix.kind, matrix.upper = data, Kind.PACKED, ctypes.addressof(upper)
    return upper, table, starts, raw, words


def _pack_groups(
    arena: Arena, first: Grouped, placed: Iterable[tuple[AnyMatrix, tuple[int, int]]], outputs: int
) -> Matrix:
    """Packs matrices with the group layout of ``first`` into records, a strip of outputs at a time."""
    layout, inputs = first.layout, first.shape[1]
    two, sides = layout.block > 1, 1 + layout.offsets
    scales = ScaleKind.TWO_LEVELS if two else ScaleKind.HALF if layout.half else ScaleKind.SINGLE
    groups = padded(-(-inputs // layout.group), layout.block)
    floats = UNIT * (4 if scales == ScaleKind.SINGLE else 2)
    record = sides * (floats + two * layout.block * UNIT) + layout.block * UNIT * layout.group * layout.bits // 8
    matrix = Matrix(
        data=arena.allocate(outputs // UNIT * groups // layout.block * record),
        units=outputs // UNIT,
        steps=groups * layout.group // WORD,
        kind=grouped_kind(layout.bits, layout.offsets, scales),
        group=layout.group,
        record_bytes=record,
        record_groups=layout.block,
        zero=layout.zero,
        levels=(ctypes.c_uint8 * 16)(*(layout.levels or range(16))),
    )

    def pack_strip(part: Grouped, first: int, last: int, at: int, step: int) -> None:
        read = part.rows(first, last)
        codes, numbers = read.codes.contiguous(), (read.scales, read.offsets)
        wholes = [_contiguous(n.wholes if isinstance(n, TwoLevels) else n) for n in numbers]
        fractions = [_contiguous(n.parts if isinstance(n, TwoLevels) else None) for n in numbers]
        source = codes.data_ptr(), _addresses(wholes), _addresses(fractions), last - first, inputs
        arena.library.foretoken_pack_groups(*source, matrix, at, step, 1)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for part, (start, step) in placed:
            assert isinstance(part, Grouped)
            work = [partial(pack_strip, part, a, b, start + a // LANES * step, step) for a, b in strips(part.shape)]
            for _ in threads.map(lambda pack: pack(), work):
                pass  # raises the exception of a strip
    return matrix


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


def _sums(values: Tensor) -> Tensor:
    """Returns the sum of each row of int8, int32 [out]. Few rows at a time, because torch widens its input."""
    return torch.cat([rows.sum(1, dtype=torch.int32) for rows in values.split(1024)])


def _by_output(vectors: Sequence[Tensor], outputs: int, interleave: bool) -> Tensor:
    """Returns one value per output in the order of the packed blocks, with zeros as padding."""
    whole = [F.pad(vector, (0, -len(vector) % LANES)) for vector in vectors]
    if interleave:
        joined = torch.stack([vector.view(-1, LANES) for vector in whole], dim=1).flatten()
    else:
        joined = torch.cat(whole)
    return F.pad(joined, (0, outputs - len(joined))).contiguous()


class WeightPacker:
    """Packs weights, and keeps objects that specifications point to.

    Args:
        arena: allocates packed matrices.
        compress: whether bfloat16 matrices are stored in 12 bits, without loss (csrc/packed.hpp).

    Attributes:
        held: tensors and structures that must outlive the specifications.
        nbytes: bytes of packed matrices.
        inactive: bytes of them that a pass over one row does not read.
    """

    def __init__(self, arena: Arena, compress: bool) -> None:
        self._arena, self._compress = arena, compress
        self.held: list[object] = []
        self.nbytes, self.inactive = 0, 0.0

    def matrix(self, parts: Sequence[AnyMatrix], bias: Tensor | None = None, interleave: bool = False) -> Matrix:
        return self._hold(pack(self._arena, _one_layout(parts), bias, interleave, self._compress))

    def linear(self, weights: LinearWeights | None, gated: bool = False) -> Matrix:
        """Packs a product, empty without weights. Blocks of outputs of gate and up alternate in a ``gated`` one."""
        if weights is None:
            return Matrix()
        return self.matrix(halves(weights.parts) if gated else weights.parts, weights.bias, interleave=gated)

    def router(self, weights: LinearWeights) -> Matrix:
        return self._hold(pack(self._arena, weights.parts, weights.bias))

    def stack(self, matrices: MatrixStack) -> Matrix:
        return self._hold(pack_stack(self._arena, matrices, self._compress))

    def norm(self, norm: NormWeight | None) -> NormSpec:
        """Keeps a norm. Returns its description, empty without one."""
        return NormSpec() if norm is None else NormSpec(self.keep(norm.weight), self.keep(norm.bias))

    def fields_of(self, weights: Any) -> dict[str, Any]:
        """Packs all weights of a dataclass. Returns fields of the structure in which they have the same names."""
        if weights is None:
            return {}
        packs: dict[type, Callable[[Any], Any]]
        packs = {LinearWeights: self.linear, MatrixStack: self.stack, NormWeight: self.norm, Tensor: self.keep}
        values = ((field.name, getattr(weights, field.name)) for field in fields(weights))
        return {name: packs[kind](value) for name, value in values for kind in packs if isinstance(value, kind)}

    def keep(self, tensor: Tensor | None) -> int | None:
        """Keeps a tensor in ``held``. Returns its address."""
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self.held.append(tensor)
        return tensor.data_ptr()

    def _hold(self, packed: Packed) -> Matrix:
        self.nbytes += packed.nbytes
        self.held.extend(packed.held)
        return packed.matrix


def _one_layout(parts: Sequence[AnyMatrix]) -> Sequence[AnyMatrix]:
    """Returns the parts of a product in one layout, if they are grouped."""
    grouped = [part for part in parts if isinstance(part, Grouped)]
    return joinable(grouped) if grouped else parts


def halves(parts: Sequence[AnyMatrix]) -> Sequence[AnyMatrix]:
    if len(parts) == 2:
        return parts
    (matrix,) = parts
    middle = matrix.shape[0] // 2
    if isinstance(matrix, Grouped):
        return [matrix.part(at, at + middle) for at in (0, middle)]
    if isinstance(matrix, Int8):
        return [Int8(matrix.values[at : at + middle], matrix.scales[at : at + middle]) for at in (0, middle)]
    return list(matrix.split(middle))
