"""This machine's processor: its features, by the names that Linux has for them, and its instruction-set level.

Linux lists them in /proc/cpuinfo, macOS answers by sysctl, and on Windows the instruction ``cpuid`` is run. Like all of
this package that a wheel's build imports, it needs nothing but Python.
"""

import ctypes
import functools
import os
import platform
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from foretoken.core.errors import InvalidRequest

X86, ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")  # names of architectures in ``platform.machine``

_SYSCTL = {
    "hw.optional.neon": "asimd",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.avx2_0": "avx2",
    "hw.optional.fma": "fma",
    "hw.optional.f16c": "f16c",
    **{f"hw.optional.{name}": name for name in ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi")},
}


class Leaf(NamedTuple):
    """The registers after ``cpuid`` for a leaf and a subleaf."""

    eax: int
    ebx: int
    ecx: int
    edx: int


Cpuid = Callable[[int, int], Leaf]

_AVX_STATE, _AVX512_STATE = 1 << 1 | 1 << 2, 1 << 5 | 1 << 6 | 1 << 7  # registers that the system saves, bits of XCR0
# Leaf, subleaf, register and bit of each feature, and the state that it needs (Intel's manual, volume 2A, CPUID).
_CPUID = {
    "fma": (1, 0, "ecx", 12, _AVX_STATE),
    "f16c": (1, 0, "ecx", 29, _AVX_STATE),
    "avx2": (7, 0, "ebx", 5, _AVX_STATE),
    "avx_vnni": (7, 1, "eax", 4, _AVX_STATE),
    "avx512f": (7, 0, "ebx", 16, _AVX512_STATE),
    "avx512dq": (7, 0, "ebx", 17, _AVX512_STATE),
    "avx512bw": (7, 0, "ebx", 30, _AVX512_STATE),
    "avx512vl": (7, 0, "ebx", 31, _AVX512_STATE),
    "avx512vbmi": (7, 0, "ecx", 1, _AVX512_STATE),
    "avx512_vnni": (7, 0, "ecx", 11, _AVX512_STATE),
    "avx512_bf16": (7, 1, "eax", 5, _AVX512_STATE),
}  # the tile registers of AMX are not used outside Linux


def read_features() -> frozenset[str]:
    if sys.platform == "darwin":
        return from_sysctl(sysctl)
    if sys.platform == "win32":
        return _on_windows() if platform.machine() in X86 else frozenset()
    try:
        return from_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"), platform.machine())
    except OSError:
        return frozenset()


def from_cpuinfo(text: str, machine: str) -> frozenset[str]:
    """Returns the features that Linux lists in /proc/cpuinfo."""
    key = "flags" if machine in X86 else "Features"
    lines = (line.partition(":")[2] for line in text.splitlines() if line.startswith(key))
    return frozenset(next(lines, "").split())


def from_sysctl(read: Callable[[str], int | None]) -> frozenset[str]:
    """Returns the features that macOS reports. ``read`` returns the number of a name, None for an unknown one."""
    return frozenset(feature for name, feature in _SYSCTL.items() if read(name))


def from_cpuid(cpuid: Cpuid, saved: int) -> frozenset[str]:
    """Returns the features of an x86-64 processor.

    Args:
        cpuid: runs the instruction for a leaf and a subleaf.
        saved: registers that the system saves, as bits of the register XCR0.
    """
    highest = cpuid(0, 0).eax
    last = cpuid(7, 0).eax if highest >= 7 else 0  # the last subleaf
    leaves = {(leaf, subleaf) for leaf, subleaf, *_ in _CPUID.values() if leaf <= highest and subleaf <= last}
    answers = {pair: cpuid(*pair) for pair in leaves}
    return frozenset(
        name
        for name, (leaf, subleaf, register, bit, state) in _CPUID.items()
        if (leaf, subleaf) in answers
        and getattr(answers[leaf, subleaf], register) >> bit & 1
        and saved & state == state
    )


def cpuid_code(leaf: int, subleaf: int, address: int) -> bytes:
    """Returns a function in machine code of x86-64 that stores the registers after ``cpuid`` at an address.

    It takes no argument, so it is the same in the calling conventions of Windows and of all others.
    """
    return b"".join(
        (
            b"\x53",  # push rbx
            b"\xb8" + struct.pack("<I", leaf),  # mov eax, leaf
            b"\xb9" + struct.pack("<I", subleaf),  # mov ecx, subleaf
            b"\x0f\xa2",  # cpuid
            b"\x49\xb8" + struct.pack("<Q", address),  # mov r8, address
            b"\x41\x89\x00",  # mov [r8], eax
            b"\x41\x89\x58\x04",  # mov [r8 + 4], ebx
            b"\x41\x89\x48\x08",  # mov [r8 + 8], ecx
            b"\x41\x89\x50\x0c",  # mov [r8 + 12], edx
            b"\x5b\xc3",  # pop rbx; ret
        )
    )


def cpuid_at(memory: int) -> Cpuid:
    """Returns a function that runs ``cpuid`` by code that it writes to executable memory at an address."""

    def cpuid(leaf: int, subleaf: int) -> Leaf:
        answer = (ctypes.c_uint32 * 4)()
        code = cpuid_code(leaf, subleaf, ctypes.addressof(answer))
        ctypes.memmove(memory, code, len(code))
        ctypes.CFUNCTYPE(None)(memory)()
        return Leaf(*answer)

    return cpuid


if sys.platform == "win32":

    def _on_windows() -> frozenset[str]:
        """Returns the features by ``cpuid``; empty if the system grants no executable memory."""
        kernel = ctypes.WinDLL("kernel32")
        kernel.VirtualAlloc.restype = ctypes.c_void_p
        kernel.VirtualAlloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint32]
        kernel.VirtualFree.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32]
        kernel.GetEnabledXStateFeatures.restype = ctypes.c_uint64
        commit, release, executable, size = 0x3000, 0x8000, 0x40, 4096
        memory = kernel.VirtualAlloc(None, size, commit, executable)
        if not memory:
            return frozenset()
        try:
            return from_cpuid(cpuid_at(memory), kernel.GetEnabledXStateFeatures())
        finally:
            kernel.VirtualFree(memory, 0, release)


def sysctl(name: str) -> int | None:
    """Returns a number that macOS knows by this name; None for an unknown name, and on other systems."""
    if sys.platform == "darwin":
        value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)  # little-endian, so that shorter numbers fit as well
        status = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
        return value.value if status == 0 and size.value in (4, 8) else None
    return None


VARIABLE = "FORETOKEN_CPU"  # selects a lower level


class Level(NamedTuple):
    """A set of instructions that kernels are compiled for."""

    name: str  # its name in FORETOKEN_CPU
    machines: tuple[str, ...]  # names of the architecture in ``platform.machine``
    features: frozenset[str]  # required features of the processor, by Linux's names
    flags: tuple[str, ...]  # compiler flags


def _x86(name: str, features: str) -> Level:
    """Returns a level of x86-64, whose features are named almost as the compiler's flags."""
    flags = (feature.replace("avx_", "avx").replace("avx512_", "avx512") for feature in features.split())
    return Level(name, X86, frozenset(features.split()), tuple(f"-m{flag.replace('_', '-')}" for flag in flags))


_AVX2 = "avx2 fma f16c"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512vl avx512dq"
_BF16 = f"{_AVX512} avx512_vnni avx512_bf16 avx512vbmi"

LEVELS = (  # of each architecture, best first
    _x86("amx", f"{_BF16} amx_tile amx_bf16 amx_int8"),
    _x86("avx512-bf16", _BF16),
    _x86("avx512-vnni", f"{_AVX512} avx512_vnni"),
    _x86("avx512", _AVX512),
    _x86("avx2-vnni", f"{_AVX2} avx_vnni"),
    _x86("avx2", _AVX2),
    Level("generic", X86, frozenset(), ()),  # every x86-64
    Level("neon-dotprod", ARM, frozenset({"asimd", "asimddp"}), ("-mcpu=generic+dotprod",)),
    Level("neon", ARM, frozenset({"asimd"}), ("-mcpu=generic",)),
)


@functools.cache
def features() -> frozenset[str]:
    """Returns the processor's features by the names that Linux has for them; empty if they are unknown."""
    return read_features()


def available() -> list[Level]:
    """Returns the levels that this processor can run, best first."""
    machine = platform.machine()
    return [level for level in LEVELS if machine in level.machines and features() >= level.features]


def chosen() -> Level | None:
    """Returns the level that kernels are compiled for; None if the processor can run none.

    Raises InvalidRequest if FORETOKEN_CPU names no level, or one that the processor cannot run.
    """
    able, name = available(), os.environ.get(VARIABLE)
    if not name:
        return able[0] if able else None
    names = ", ".join(level.name for level in able) or "none"
    by_name = {level.name: level for level in LEVELS}
    if name not in by_name:
        raise InvalidRequest(f"{VARIABLE}={name} is not known; this processor can run {names}")
    if by_name[name] in able:
        return by_name[name]
    missing = ", ".join(sorted(by_name[name].features - features()))
    raise InvalidRequest(
        f"{VARIABLE}={name} needs {missing or by_name[name].machines[0]}, which this processor lacks; "
        f"it can run {names}"
    )


def reason() -> str:
    if os.environ.get(VARIABLE):
        return f"{VARIABLE} is set"
    level = chosen()
    machine = platform.machine()
    levels = [candidate for candidate in LEVELS if machine in candidate.machines]
    if level is None:
        missing = levels[-1].features - features() if levels else ()
        return f"the processor lacks {', '.join(sorted(missing))}" if missing else f"no kernels for {machine}"
    better = levels[: levels.index(level)]
    if not better:
        return "the best level there is"
    return f"the best that the processor can run; {better[-1].name} needs " + ", ".join(
        sorted(better[-1].features - features())
    )
