"""Large memory outside Python's heap: aligned, zeroed, in huge pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref

from foretoken.models.runners.native.bindings import PackingFunctions

CACHE_LINE, PIECE = 64, 2**22  # bytes


def padded(count: int, to: int) -> int:
    """Returns ``count`` rounded up to a multiple of ``to``."""
    return -(-count // to) * to


class Arena:
    """Memory of one runner, freed when the arena is garbage-collected."""

    def __init__(self, library: PackingFunctions) -> None:
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

    @property
    def held(self) -> tuple[tuple[int, int], ...]:
        """Address and size of each allocation."""
        return tuple(self._held)

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(size for _, size in self._held)

    def free(self, address: int) -> None:
        """Frees memory that ``allocate`` returned."""
        held = next(item for item in self._held if item[0] == address)
        self._held.remove(held)
        self.library.foretoken_free(*held)

    @staticmethod
    def copy(to: int, source: int, size: int) -> None:
        """Copies ``size`` bytes to the address ``to``."""
        ctypes.memmove(to, source, size)


class SmallMatrices:
    """Memory of many small matrices of an arena, in large blocks.

    Args:
        arena: allocates the blocks.

    Attributes:
        nbytes: requested bytes.
    """

    def __init__(self, arena: Arena) -> None:
        self.library, self.nbytes = arena.library, 0
        self._arena, self._at, self._left = arena, 0, 0

    def allocate(self, size: int) -> int:
        """Returns the address of ``size`` zeroed bytes. Raises MemoryError."""
        size = padded(size, CACHE_LINE)
        if size > self._left:
            self._left = max(size, PIECE)
            self._at = self._arena.allocate(self._left)
        address = self._at
        self._at, self._left, self.nbytes = self._at + size, self._left - size, self.nbytes + size
        return address


def discard(address: int, size: int) -> None:
    """Returns the memory in a range of an arena to the system, which zeroes it. Keeps it where that cannot be done."""
    start, end = padded(address, mmap.PAGESIZE), (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _free(library: PackingFunctions, held: list[tuple[int, int]]) -> None:
    for address, size in held:
        library.foretoken_free(address, size)
