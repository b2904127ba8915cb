"""Packed weights and other large memory outside Python's heap: aligned, zeroed, in huge pages."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.formats.quantize import Int8
from foretoken.models.formats.quantize import Matrix as AnyMatrix
from foretoken.models.runners.native.bindings import LANES, TILE_STEPS, UNIT, Matrix

WORD = 4  # bytes


def padded(count: int, to: int) -> int:
    """Returns ``count`` rounded up to a multiple of ``to``."""
    return -(-count // to) * to


class Arena:
    """Memory of one runner, freed when the arena is garbage-collected."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._held: list[tuple[int, int]] = []
        weakref.finalize(self, _free, library, self._held)

    def allocate(self, size: int) -> int:
        """Returns the address of ``size`` zeroed bytes. Raises MemoryError."""
        address = self.library.foretoken_allocate(size)
        if not address:
            raise MemoryError(f"no memory for another {size / 2**20:.0f} MiB")
        self._held.append((address, size))
        return int(address)


def _free(library: ctypes.CDLL, held: list[tuple[int, int]]) -> None:
    for address, size in held:
        library.foretoken_free(address, size)


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix, and the tensors that it points to, which must outlive it."""

    matrix: Matrix
    held: tuple[Tensor, ...]


def pack(arena: Arena, parts: Sequence[AnyMatrix], bias: Tensor | None = None, interleave: bool = False) -> Packed:
    """Packs matrices [out, in] with the same inputs into one.

    Args:
        arena: allocates the packed matrix.
        parts: all float32, all bfloat16 or all int8. Several parts that are not interleaved have multiples of sixteen
            outputs.
        bias: [out]; only if the parts are not interleaved.
        interleave: whether blocks of sixteen outputs alternate between the parts; otherwise the parts are concatenated.
    """
    values = [part.values if isinstance(part, Int8) else part for part in parts]
    per_word = WORD // values[0].element_size()
    inputs = padded(values[0].shape[1], per_word)
    steps = padded(inputs // per_word, TILE_STEPS)
    blocks = [padded(part.shape[0], LANES) // LANES for part in values]
    outputs = padded(sum(blocks) * LANES, UNIT)
    matrix = Matrix(data=arena.allocate(outputs * steps * WORD), units=outputs // UNIT, steps=steps)
    first = 0
    for number, part in enumerate(values):
        whole = F.pad(part, (0, inputs - part.shape[1])) if inputs != part.shape[1] else part.contiguous()
        start, step = (number, len(values)) if interleave else (first, 1)
        source = whole.data_ptr(), whole.shape[0], inputs // per_word
        arena.library.foretoken_pack(*source, matrix.data, steps, start, step, torch.get_num_threads())
        first += blocks[number]
    held: dict[str, Tensor] = {}
    if bias is not None:
        held["bias"] = _by_output([bias.float()], outputs, False)
    quantised = [part for part in parts if isinstance(part, Int8)]
    if quantised:
        held["scales"] = _by_output([part.scales for part in quantised], outputs, interleave)
        held["sums"] = _by_output([_sums(part.values) for part in quantised], outputs, interleave)
    for name, tensor in held.items():
        setattr(matrix, name, tensor.data_ptr())
    return Packed(matrix, tuple(held.values()))


def _sums(values: Tensor) -> Tensor:
    """Returns the sum of each row of int8, int32 [out]. Few rows at a time, because torch widens its input."""
    return torch.cat([rows.sum(1, dtype=torch.int32) for rows in values.split(1024)])


def _by_output(vectors: Sequence[Tensor], outputs: int, interleave: bool) -> Tensor:
    """Returns one number per output in the order of the packed blocks, with zeros as padding."""
    whole = [F.pad(vector, (0, -len(vector) % LANES)) for vector in vectors]
    if interleave:
        joined = torch.stack([vector.view(-1, LANES) for vector in whole], dim=1).flatten()
    else:
        joined = torch.cat(whole)
    return F.pad(joined, (0, outputs - len(joined))).contiguous()
