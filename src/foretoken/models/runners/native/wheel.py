"""Compiles the kernels that a wheel holds: every library, for every instruction-set level of a platform.

Hatch's build hook (build_kernels.py) calls it without installed packages: it imports only Python and modules that do
the same.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from pathlib import Path

from foretoken.core.native import build
from foretoken.core.native.cpu import LEVELS, Level
from foretoken.core.native.toolchain import PLATFORMS, Toolchain, cross, own_tag
from foretoken.models.runners.native.build import whole_libraries

GLIBC = (2, 28)  # the newest version that manylinux_2_28 allows
_VERSION = re.compile(rb"GLIBC_(\d+)\.(\d+)")


def build_wheel_kernels(name: str, names: Sequence[str] = ()) -> tuple[str, dict[str, Path]]:
    """Compiles the libraries of a wheel.

    Args:
        name: One of ``toolchain.PLATFORMS``, compiled by Zig, or "here": this machine, by its own compiler.
        names: Instruction-set levels; empty for all of the platform.

    Returns:
        The wheel's tag, and files by their names in the wheel.

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
    """Returns compiler, processor and tag."""
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
