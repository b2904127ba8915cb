"""C++ compilers: the one of this machine, and Zig's, which compiles for other systems as well.

``python -m foretoken.core.native.toolchain`` prints this machine's compiler and fails if there is none; make uses it.
"""

import importlib.util
import shutil
import sys
import sysconfig
from typing import NamedTuple


class Platform(NamedTuple):
    """A platform that wheels are built for."""

    target: str  # its name for the compiler; glibc 2.28 is that of manylinux_2_28
    machine: str  # its processor's name, as ``platform.machine`` gives it there
    tag: str  # its name in the wheel's file name
    suffix: str = ".so"  # end of its libraries' names
    without: tuple[str, ...] = ()  # instruction-set levels that its machines lack


_NO_MAC = ("amx", "avx512-bf16", "avx512-vnni", "avx2-vnni")  # macOS does not report VNNI, which few Macs have

PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.28", "x86_64", "manylinux_2_28_x86_64"),
    "linux-aarch64": Platform("aarch64-linux-gnu.2.28", "aarch64", "manylinux_2_28_aarch64"),
    "macos-arm64": Platform("aarch64-macos.11.0", "arm64", "macosx_11_0_arm64", ".dylib"),
    "macos-x86_64": Platform("x86_64-macos.11.0", "x86_64", "macosx_11_0_x86_64", ".dylib", _NO_MAC),
    "windows-x86_64": Platform("x86_64-windows-gnu", "AMD64", "win_amd64", ".dll", ("amx",)),
}


# Flags by the ends of libraries' names. Of an inline function in several libraries macOS takes one for all, unless it
# is hidden; those of the kernels refer to their own library's table of kinds.
_COMPILING: dict[str, tuple[str, ...]] = {
    ".so": ("-fPIC",),
    ".dylib": ("-fPIC", "-fvisibility-inlines-hidden"),
    ".dll": (),
}


class Toolchain(NamedTuple):
    """A compiler and the system it compiles for."""

    command: tuple[str, ...]  # program and first arguments
    suffix: str  # end of libraries' names
    compiling: tuple[str, ...] = ()  # further flags for source files
    linking: tuple[str, ...] = ()  # further flags for libraries
    # folder of its files within that of the kernels; that of this machine's compiler is the folder itself
    folder: str = ""


def local_suffix() -> str:
    """Returns the end of the names of this machine's libraries."""
    return {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")


def local() -> Toolchain | None:
    """Returns this machine's compiler: c++, g++ or clang++ on PATH, else Zig's if it is installed; None if none is."""
    suffix = local_suffix()
    compiling = _COMPILING[suffix]
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Toolchain((path,), suffix, compiling)
    zig = _zig()
    return Toolchain(zig, suffix, (*compiling, "-g0"), ("-s",)) if zig else None


def cross(platform: Platform) -> Toolchain | None:
    """Returns Zig's compiler for a platform; None if it is not installed."""
    target = ("-target", platform.target)
    compiling = (*target, "-g0", *_COMPILING[platform.suffix])
    zig = _zig()
    return Toolchain(zig, platform.suffix, compiling, (*target, "-s"), platform.tag) if zig else None


def own_tag() -> str:
    """Returns the platform tag of libraries that only this machine's compiler has made."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _zig() -> tuple[str, ...] | None:
    """Returns the command of the package ziglang, which ``foretoken[compiler]`` installs."""
    return (sys.executable, "-m", "ziglang", "c++") if importlib.util.find_spec("ziglang") else None


if __name__ == "__main__":
    tools = local()
    if tools is None:
        sys.exit("there is no C++ compiler")
    sys.stdout.write(" ".join(tools.command) + "\n")
