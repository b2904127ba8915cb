"""Builds the decoder's kernels: a library for each set of weight types and cache type; in a wheel one for all of them.

Each type is compiled separately, so that a model with a new set compiles only new types.

Hatch's build hook (build_kernels.py) compiles a wheel's libraries without installed packages: this module imports only
Python and modules that do the same.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.core.native import build
from foretoken.core.native.cpu import LEVELS, Level
from foretoken.core.native.status import load
from foretoken.core.native.toolchain import PLATFORMS, Toolchain, cross, own_tag
from foretoken.models.runners.native.bindings import DecoderFunctions, PackingFunctions

if TYPE_CHECKING:
    import torch

_SOURCES = Path(__file__).parent / "csrc"

WIDTHS = (4, 6, 8)  # bits of codes in groups, in the order of csrc/grouped.hpp


class Kind(IntEnum):
    """Number types, with the values of csrc/simd.hpp."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    PACKED = 3  # bfloat16 in 12 bits
    GROUPED = 4  # the first of the kinds with scales in groups of inputs; see ``grouped_kind``


class ScaleKind(IntEnum):
    """Storage of the groups' scales, with the values of csrc/grouped.hpp."""

    HALF = 0
    SINGLE = 1
    TWO_LEVELS = 2


CACHES = (Kind.FLOAT32, Kind.BFLOAT16, Kind.INT8)  # of KV caches


def grouped_kind(bits: int, offsets: bool, scales: ScaleKind) -> int:
    """Returns the kind of matrices with codes of ``bits`` bits in groups, numbered as in csrc/grouped.hpp."""
    return Kind.GROUPED + WIDTHS.index(bits) + 3 * offsets + 6 * scales


def kind_bits(kind: int) -> int:
    plain = {Kind.FLOAT32: 32, Kind.BFLOAT16: 16, Kind.INT8: 8, Kind.PACKED: 12}
    return WIDTHS[(kind - Kind.GROUPED) % len(WIDTHS)] if kind >= Kind.GROUPED else plain[Kind(kind)]


def library(weights: Iterable[int], cache: Kind) -> DecoderFunctions:
    """Returns the kernels for these kinds of weights and this KV cache. Raises KernelsUnavailable."""
    kinds, level = sorted(set(weights)), build.require()
    return loaded_library(tuple(kinds), cache, level)


@functools.cache
def loaded_library(kinds: tuple[int, ...], cache: Kind, level: Level) -> DecoderFunctions:
    """Returns the kernels for these kinds and instruction sets, loaded once. Raises KernelsUnavailable."""
    whole = decoder_sources(_all_kinds(), CACHES)
    kernels = load(build.linked("decoder", decoder_sources(kinds, (cache,)), level, whole))
    if not kernels.foretoken_ready():
        raise build.KernelsUnavailable("the system does not grant the CPU's tile registers")
    return DecoderFunctions(kernels, kinds, cache)


def packing_library() -> PackingFunctions:
    """Returns the functions that allocate and pack. Raises KernelsUnavailable."""
    return _packing_library(build.require())


@functools.cache
def _packing_library(level: Level) -> PackingFunctions:
    return PackingFunctions(load(build.compiled(_SOURCES / "packing.cpp", (), level)))


def kernels_available() -> bool:
    """Returns whether this machine has compiled kernels, and compiles them if needed."""
    try:
        packing_library()
    except build.KernelsUnavailable:
        return False
    return True


def packs_groups(dtype: torch.dtype) -> bool:
    """Returns whether the kernels multiply matrices in groups in a model of this dtype."""
    # by name, because a wheel's build, which imports this module, has no torch
    return kernels_available() and str(dtype) in ("torch.float32", "torch.bfloat16")


def decoder_sources(kinds: Iterable[int], caches: Iterable[int]) -> list[tuple[Path, tuple[str, ...]]]:
    """Returns the sources of a decoder for these kinds of weights and KV caches, with their flags."""
    decoders = [(_SOURCES / "decoder.cpp", (f"-DFORETOKEN_KV={cache:d}",)) for cache in caches]
    products = [(_SOURCES / "kind.cpp", (f"-DFORETOKEN_KIND={kind:d}",)) for kind in kinds]
    return [(_SOURCES / "library.cpp", ()), *decoders, *products]


def whole_libraries() -> dict[str, build.Sources]:
    """Returns the sources of the libraries that a wheel holds for each level, by name."""
    return {
        "decoder": decoder_sources(_all_kinds(), CACHES),
        "packing": [(_SOURCES / "packing.cpp", ())],
        "sampling": [(build.SHARED / "sampling.cpp", ())],
    }


def prebuilt(level: Level) -> bool:
    """Returns whether the wheel has the libraries of a level, so that nothing is compiled."""
    return all(build.shipped(name, sources, level) for name, sources in whole_libraries().items())


def _all_kinds() -> list[int]:
    grouped = [
        grouped_kind(bits, offsets, scales) for scales in ScaleKind for offsets in (False, True) for bits in WIDTHS
    ]
    return [*Kind, *grouped[1:]]


GLIBC = (2, 28)  # the newest version that manylinux_2_28 allows
_VERSION = re.compile(rb"GLIBC_(\d+)\.(\d+)")


def build_wheel_kernels(name: str, names: Sequence[str] = ()) -> tuple[str, dict[str, Path]]:
    """Compiles the libraries of a wheel. Returns the wheel's tag, and files by their names in the wheel.

    Args:
        name: One of ``toolchain.PLATFORMS``, compiled by Zig, or "here": this machine, by its own compiler.
        names: Instruction-set levels; empty for all of the platform.

    Raises:
        ValueError: The platform or a level is not known.
        KernelsUnavailable: There is no compiler, or it fails.
    """
    toolchain, machine, tag = _target(name)
    without = PLATFORMS[name].without if name in PLATFORMS else ()
    levels = {level.name: level for level in LEVELS if machine in level.machines and level.name not in without}
    if unknown := [level for level in names if level not in levels]:
        raise ValueError(f"no level {', '.join(unknown)} on {machine}; there are {', '.join(levels) or 'none'}")
    if not levels:
        raise ValueError(f"there are no kernels for {machine}")
    chosen = [level for level in levels.values() if not names or level.name in names]
    files = _compiled("pool", [(build.SHARED / "pool.cpp", ())], build.ANY, toolchain)
    for level in chosen:
        for library, sources in whole_libraries().items():
            files |= _compiled(library, sources, level, toolchain)
    if "manylinux" in tag:
        _check_glibc(files)
    return f"py3-none-{tag}", files


def newest_glibc(library: bytes) -> tuple[int, int]:
    """Returns the newest version of glibc whose symbols a Linux library names; (0, 0) if it names none."""
    return max(((int(major), int(minor)) for major, minor in _VERSION.findall(library)), default=(0, 0))


def _target(name: str) -> tuple[Toolchain, str, str]:
    if name == "here":
        return build.toolchain(), platform.machine(), own_tag()
    if name not in PLATFORMS:
        raise ValueError(f"no platform {name!r}; choose here, {', '.join(PLATFORMS)}")
    wanted = PLATFORMS[name]
    toolchain = cross(wanted)
    if toolchain is None:
        raise build.KernelsUnavailable("Zig compiles for other systems; install it with 'pip install ziglang'")
    return toolchain, wanted.machine, wanted.tag


def _compiled(name: str, sources: build.Sources, level: Level, toolchain: Toolchain) -> dict[str, Path]:
    path = build.linked(name, sources, level, tools=toolchain)
    return {build.shipped_name(name, sources, level, toolchain.suffix): path}


def _check_glibc(files: dict[str, Path]) -> None:
    for name, path in files.items():
        if (newest := newest_glibc(path.read_bytes())) > GLIBC:
            raise ValueError(f"{name} needs glibc {newest[0]}.{newest[1]}, and the wheel's tag promises 2.28")
