"""Builds the decoder's kernels: one library for each set of weight types and cache type.

Each type is compiled by itself, so that a model with a new set compiles only what no model before it had.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

import torch

from foretoken.core.native import build
from foretoken.models.runners.native.bindings import declare, declare_packing

_SOURCES = Path(__file__).parent / "csrc"
VNNI = "avx512_vnni"  # the instruction for sums of products of int8
# Name in /proc/cpuinfo: compiler flag
_NAMES = {"avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16", "avx512vbmi": "avx512vbmi"}
_TILES = {"amx_tile": "amx-tile", "amx_bf16": "amx-bf16", "amx_int8": "amx-int8"}


WIDTHS = (4, 6, 8)  # bits of codes in groups, in the order of csrc/grouped.hpp


class Kind(IntEnum):
    """Types of numbers, with the values of csrc/simd.hpp."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    PACKED = 3  # bfloat16 in 12 bits
    GROUPED = 4  # the first of the kinds with scales in groups of inputs; see ``grouped_kind``


class ScaleKind(IntEnum):
    """How the scales of groups are stored, with the values of csrc/grouped.hpp."""

    HALF = 0
    SINGLE = 1
    TWO_LEVELS = 2


def grouped_kind(bits: int, offsets: bool, scales: ScaleKind) -> int:
    """Returns the kind of matrices with codes of ``bits`` bits in groups, as csrc/grouped.hpp numbers them."""
    return Kind.GROUPED + WIDTHS.index(bits) + 3 * offsets + 6 * scales


def library(weights: Iterable[int], cache: Kind) -> ctypes.CDLL:
    """Returns the kernels for these kinds of weights and this KV cache. Raises KernelsUnavailable."""
    kinds = sorted(set(weights))
    build.require(*((VNNI,) if any(kind == Kind.INT8 or kind >= Kind.GROUPED for kind in kinds) else ()))
    return loaded_library(tuple(kinds), cache, tuple(_instructions()))


@functools.cache
def loaded_library(kinds: tuple[int, ...], cache: Kind, instructions: tuple[str, ...]) -> ctypes.CDLL:
    """Returns the kernels for these kinds and instruction sets, loaded once. Raises KernelsUnavailable."""
    decoder = (_SOURCES / "decoder.cpp", (*instructions, f"-DFORETOKEN_KV={cache:d}"))
    products = [(_SOURCES / "kind.cpp", (*instructions, f"-DFORETOKEN_KIND={kind:d}")) for kind in kinds]
    kernels = declare(ctypes.CDLL(str(build.linked("decoder", [decoder, *products]))))
    if not kernels.foretoken_ready():
        raise build.KernelsUnavailable("the system does not grant the CPU's tile registers")
    return kernels


@functools.cache
def packing_library() -> ctypes.CDLL:
    """Returns the functions that allocate and pack, loaded once. Raises KernelsUnavailable."""
    build.require()
    return declare_packing(ctypes.CDLL(str(build.compiled(_SOURCES / "packing.cpp", ("-mf16c",)))))


def instruction_sets() -> list[str]:
    """Returns the instruction sets that kernels compiled here use, by their usual names."""
    return ["AVX-512", *(flag.removeprefix("-m") for flag in _instructions())]


def packs_groups(dtype: torch.dtype) -> bool:
    """Returns whether the kernels multiply matrices in groups here in a model of this dtype."""
    try:
        build.require(VNNI)
        packing_library()
    except build.KernelsUnavailable:
        return False
    return dtype in (torch.float32, torch.bfloat16)


def _instructions() -> list[str]:
    """Returns compiler flags for the optional instruction sets of this processor."""
    named = _NAMES | (_TILES if build.cpu_flags().issuperset(_TILES) else {})
    return [f"-m{flag}" for name, flag in named.items() if name in build.cpu_flags()]
