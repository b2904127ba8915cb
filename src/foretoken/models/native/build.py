"""Compiling the kernels: once per machine and kind of number, kept on disk, with whatever C++ compiler is there.

Without a compiler, or on a CPU without AVX-512, ``library`` says why and the runner made of torch operators serves.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from enum import IntEnum
from pathlib import Path

from foretoken.models.native.bindings import declare
from foretoken.zoo import cache_folder

SOURCES = Path(__file__).parent / "csrc"
SWITCH = "FORETOKEN_NATIVE"  # "0" keeps the compiled kernels out
_log = logging.getLogger(__name__)
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-w")
_REQUIRED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
_NAMES = {"avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16"}  # as the system calls them, as compilers do
_TILES = {"amx_tile": "amx-tile", "amx_bf16": "amx-bf16", "amx_int8": "amx-int8"}


class Kind(IntEnum):
    """What words hold; the numbers are those of csrc/simd.hpp."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


class Unavailable(Exception):
    """Why the compiled kernels cannot serve here, in words."""


def library(weights: Kind, cache: Kind) -> ctypes.CDLL:
    """The kernels for these weights and this kind of cache. Raises ``Unavailable``."""
    if os.environ.get(SWITCH) == "0":
        raise Unavailable(f"{SWITCH}=0 is set")
    return _loaded((*_FLAGS, *_instructions(weights), f"-DFORETOKEN_KIND={weights:d}", f"-DFORETOKEN_KV={cache:d}"))


@functools.cache
def _loaded(flags: tuple[str, ...]) -> ctypes.CDLL:
    loaded = declare(ctypes.CDLL(str(_compiled(flags))))
    if not loaded.foretoken_ready():
        raise Unavailable("the system does not hand out the CPU's tile registers")
    return loaded


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What the processor can do, by the names of /proc/cpuinfo; empty where that cannot be read."""
    if platform.machine() not in ("x86_64", "AMD64") or not Path("/proc/cpuinfo").is_file():
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _instructions(weights: Kind) -> list[str]:
    """Compiler flags for everything this processor has."""
    flags = cpu_flags()
    needed = {*_REQUIRED, *(("avx512_vnni",) if weights == Kind.INT8 else ())}
    if lost := sorted(needed - flags):
        raise Unavailable(f"the processor lacks {', '.join(lost)}")
    named = {name: name for name in _REQUIRED} | _NAMES
    if flags.issuperset(_TILES):
        named |= _TILES
    return [f"-m{flag}" for name, flag in named.items() if name in flags]


def _compiled(flags: tuple[str, ...]) -> Path:
    """The shared library for these flags, from the cache or made now; a half-written one is never seen."""
    sources = sorted(SOURCES.glob("*.[ch]pp"))
    text = b"\0".join([*(source.read_bytes() for source in sources), " ".join(flags).encode()])
    folder = cache_folder() / "native"
    target = folder / f"decoder-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if target.is_file():
        return target
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable("there is no C++ compiler (c++, g++ or clang++)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / target.name
            command = [compiler, *flags, str(SOURCES / "decoder.cpp"), "-o", str(made)]
            _log.info("compiling the decoder's kernels, once: %s", " ".join(command))
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Unavailable(f"{compiler} does not compile the kernels: {_first_error(done.stderr)}")
            made.replace(target)
    except OSError as error:
        raise Unavailable(f"the kernels cannot be kept in {folder} ({error.strerror})") from error
    return target


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")
