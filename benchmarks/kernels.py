"""The least time that a pass could take: that of reading memory, and of multiplying alone."""

import ctypes
from functools import partial
from pathlib import Path

import torch

from foretoken.bench.measure import TimedTask
from foretoken.bench.output import cores
from foretoken.core.native.build import compiled

_PRODUCTS = 64  # of one vpdpbusd


class Floors:
    """Tasks that take the least time that the machine allows, on all cores.

    max_bytes: The most memory that is read. flags: Compiler flags; vpdpbusd needs "-mavx512vnni".
    """

    def __init__(self, max_bytes: int, *flags: str) -> None:
        self._library = ctypes.CDLL(str(compiled(Path(__file__).parent / "floors.cpp", flags)))
        self._library.read_memory.restype = self._library.multiply.restype = None
        self._block = torch.ones(max_bytes // 8 + 1024, dtype=torch.int64)

    def reading(self, size: int) -> TimedTask:
        """Returns the task of reading ``size`` bytes of memory."""
        address, length = ctypes.c_void_p(self._block.data_ptr()), ctypes.c_int64(size // 64 * 64)
        return TimedTask(partial(self._library.read_memory, address, length, cores()))

    def multiplying(self, products: int) -> TimedTask:
        """Returns the task of running as many vpdpbusd instructions as ``products`` need."""
        return TimedTask(partial(self._library.multiply, ctypes.c_int64(products // _PRODUCTS), cores()))
