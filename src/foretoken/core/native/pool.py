"""The process's pool of threads, shared by all libraries of kernels (csrc/pool.hpp)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from foretoken.core.native import build


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the pool's library, loaded once. Its threads are started on first use. Raises KernelsUnavailable."""
    pool = ctypes.CDLL(str(build.compiled(build.SHARED / "pool.cpp", (), build.ANY)))
    pool.foretoken_pool.restype = ctypes.c_void_p
    pool.foretoken_pool_spin.argtypes, pool.foretoken_pool_spin.restype = [ctypes.c_int, ctypes.c_int], None
    return pool


def load(path: Path) -> ctypes.CDLL:
    """Returns a library of kernels, loaded, with the functions of the pool. Raises KernelsUnavailable."""
    functions = library().foretoken_pool()
    kernels = ctypes.CDLL(str(path))
    kernels.foretoken_use_pool.restype = None
    kernels.foretoken_use_pool(ctypes.c_void_p(functions))
    return kernels
