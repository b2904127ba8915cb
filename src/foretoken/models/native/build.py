"""The decoder's kernels, one library for each pair of kinds of numbers."""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from pathlib import Path

from foretoken.core.native import build
from foretoken.models.native.bindings import declare

_SOURCE = Path(__file__).parent / "csrc" / "decoder.cpp"
_NAMES = {"avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16"}  # as the system calls them, as compilers do
_TILES = {"amx_tile": "amx-tile", "amx_bf16": "amx-bf16", "amx_int8": "amx-int8"}


class Kind(IntEnum):
    """What words hold; the numbers are those of csrc/simd.hpp."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


def library(weights: Kind, cache: Kind) -> ctypes.CDLL:
    """The kernels for these weights and this kind of cache. Raises ``Unavailable``."""
    build.require(*(("avx512_vnni",) if weights == Kind.INT8 else ()))
    return _loaded((*_instructions(), f"-DFORETOKEN_KIND={weights:d}", f"-DFORETOKEN_KV={cache:d}"))


@functools.cache
def _loaded(flags: tuple[str, ...]) -> ctypes.CDLL:
    loaded = declare(ctypes.CDLL(str(build.compiled(_SOURCE, flags))))
    if not loaded.foretoken_ready():
        raise build.Unavailable("the system does not hand out the CPU's tile registers")
    return loaded


def _instructions() -> list[str]:
    """Compiler flags for what this processor has beside the required."""
    named = _NAMES | (_TILES if build.cpu_flags().issuperset(_TILES) else {})
    return [f"-m{flag}" for name, flag in named.items() if name in build.cpu_flags()]
