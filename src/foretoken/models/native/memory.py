"""Packed weights and pages of keys and values, outside Python's heap: aligned, zeroed, in large pages."""

from __future__ import annotations

import ctypes
import heapq
import weakref
from array import array

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.native.bindings import LANES, PAGE, TILE_STEPS, UNIT, Matrix

WORD = 4  # bytes


def padded(count: int, to: int) -> int:
    """``count`` rounded up to a multiple of ``to``."""
    return -(-count // to) * to


class Arena:
    """Everything that one runner allocated; given back when the runner goes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._held: list[tuple[int, int]] = []
        weakref.finalize(self, _free, library, self._held)

    def allocate(self, size: int) -> int:
        """The address of ``size`` zeroed bytes. Raises MemoryError."""
        address = self.library.foretoken_allocate(size)
        if not address:
            raise MemoryError(f"no memory for another {size / 2**20:.0f} MiB")
        self._held.append((address, size))
        return int(address)


def _free(library: ctypes.CDLL, held: list[tuple[int, int]]) -> None:
    for address, size in held:
        library.foretoken_free(address, size)


def pack(arena: Arena, parts: list[Tensor], interleave: bool = False) -> Matrix:
    """Matrices [out, in] below one another, or with their blocks of sixteen rows taking turns, as one product.

    float32, bfloat16 or int8; the kind decides how many inputs share a word. Biases and scales are the caller's.
    """
    size = parts[0].element_size()
    words = padded(parts[0].shape[1], WORD // size) * size // WORD
    steps = padded(words, TILE_STEPS)
    blocks = [padded(part.shape[0], LANES) // LANES for part in parts]
    if not interleave and any(part.shape[0] % LANES for part in parts[:-1]):
        parts, blocks = [torch.cat(parts)], [padded(sum(p.shape[0] for p in parts), LANES) // LANES]
    outputs = padded(sum(blocks) * LANES, UNIT)
    data = arena.allocate(outputs * steps * WORD)
    first = 0
    for number, part in enumerate(parts):
        whole = (
            part.contiguous()
            if part.shape[1] % (WORD // size) == 0
            else F.pad(part, (0, -part.shape[1] % (WORD // size)))
        )
        start, step = (number, len(parts)) if interleave else (first, 1)
        arena.library.foretoken_pack(
            whole.data_ptr(), part.shape[0], words, data, steps, start, step, torch.get_num_threads()
        )
        first += blocks[number]
    return Matrix(data=data, units=outputs // UNIT, steps=steps)


class Pages:
    """Slots of cache rows, each a list of pages; a slot grows by whole pages and nothing is ever copied."""

    def __init__(self, arena: Arena, page_bytes: int) -> None:
        self._arena, self._page_bytes = arena, page_bytes
        self._spare: list[int] = []
        self._free_slots: list[int] = []
        self._slots: list[array[int]] = []

    def acquire(self) -> int:
        """The lowest free slot."""
        if not self._free_slots:
            self._slots.append(array("Q"))
            return len(self._slots) - 1
        return heapq.heappop(self._free_slots)

    def release(self, slot: int) -> None:
        """Its pages serve others from now on."""
        self._spare.extend(self._slots[slot])
        self._slots[slot] = array("Q")
        heapq.heappush(self._free_slots, slot)

    def reserve(self, slot: int, rows: int) -> int:
        """Room for ``rows`` rows. -> the address of the slot's list of pages, good until it grows again"""
        pages = self._slots[slot]
        while len(pages) * PAGE < rows:
            pages.append(self._spare.pop() if self._spare else self._arena.allocate(self._page_bytes))
        return pages.buffer_info()[0]

    def nbytes(self) -> int:
        """Bytes of all pages in use."""
        return self._page_bytes * sum(len(pages) for pages in self._slots)
