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
from foretoken.core.native.cpu import Level
from foretoken.core.native.pool import load
from foretoken.models.runners.native.bindings import declare, declare_packing

_SOURCES = Path(__file__).parent / "csrc"

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
    kinds, level = sorted(set(weights)), build.require()
    return loaded_library(tuple(kinds), cache, level)


@functools.cache
def loaded_library(kinds: tuple[int, ...], cache: Kind, level: Level) -> ctypes.CDLL:
    """Returns the kernels for these kinds and instruction sets, loaded once. Raises KernelsUnavailable."""
    decoder = (_SOURCES / "decoder.cpp", (f"-DFORETOKEN_KV={cache:d}",))
    products = [(_SOURCES / "kind.cpp", (f"-DFORETOKEN_KIND={kind:d}",)) for kind in kinds]
    kernels = declare(load(build.linked("decoder", [decoder, *products], level)))
    if not kernels.foretoken_ready():
        raise build.KernelsUnavailable("the system does not grant the CPU's tile registers")
    return kernels


def packing_library() -> ctypes.CDLL:
    """Returns the functions that allocate and pack. Raises KernelsUnavailable."""
    return _packing_library(build.require())


@functools.cache
def _packing_library(level: Level) -> ctypes.CDLL:
    return declare_packing(load(build.compiled(_SOURCES / "packing.cpp", (), level)))


def kernels_available() -> bool:
    """Returns whether there are compiled kernels for this machine. They may be compiled for that."""
    try:
        packing_library()
    except build.KernelsUnavailable:
        return False
    return True


def packs_groups(dtype: torch.dtype) -> bool:
    """Returns whether the kernels multiply matrices in groups here in a model of this dtype."""
    try:
        packing_library()
    except build.KernelsUnavailable:
        return False
    return dtype in (torch.float32, torch.bfloat16)
