"""Compiles kernels once per machine and set of flags, with the C++ compiler of the machine, and caches them on disk.

Without a compiler, or on a CPU without AVX-512, ``KernelsUnavailable`` is raised and torch operators are the fallback.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from foretoken.core.files import cache_folder

SHARED = Path(__file__).parent / "csrc"
SWITCH = "FORETOKEN_NATIVE"  # "0" disables the compiled kernels
REQUIRED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
_log = logging.getLogger(__name__)
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-w")


class KernelsUnavailable(Exception):
    """Compiled kernels cannot be used on this machine. The message says why."""


class KernelsDisabled(KernelsUnavailable):
    """Compiled kernels are switched off by FORETOKEN_NATIVE=0."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Returns the processor's features by their names in /proc/cpuinfo; empty where that cannot be read."""
    if platform.machine() not in ("x86_64", "AMD64") or not Path("/proc/cpuinfo").is_file():
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def require(*features: str) -> None:
    """Raises KernelsUnavailable where kernels are disabled or the processor lacks one of ``features``."""
    if os.environ.get(SWITCH) == "0":
        raise KernelsDisabled(f"{SWITCH}=0 is set")
    if missing := sorted({*REQUIRED, *features} - cpu_flags()):
        raise KernelsUnavailable(f"the processor lacks {', '.join(missing)}")


def compiler() -> str:
    """Returns the path of the C++ compiler. Raises KernelsUnavailable."""
    path = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if path is None:
        raise KernelsUnavailable(
            "there is no C++ compiler (c++, g++ or clang++); install one, for instance with 'apt install g++'"
        )
    return path


def compiled(source: Path, flags: Sequence[str]) -> Path:
    """Returns the shared library of ``source``, from the cache or compiled now. The file is written atomically.

    Args:
        source: C++ file. It may include headers beside it and in ``SHARED``.
        flags: Compiler flags in addition to the common ones.

    Raises:
        KernelsUnavailable: There is no compiler, or it fails.
    """
    flags = (*_FLAGS, *(f"-m{name}" for name in REQUIRED), *flags)
    beside = sorted({*source.parent.glob("*.hpp"), *SHARED.glob("*.hpp"), source})
    text = b"\0".join([*(file.read_bytes() for file in beside), " ".join(flags).encode()])
    folder = cache_folder() / "native"
    target = folder / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if target.is_file():
        return target
    program = compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            library = Path(scratch) / target.name
            command = [program, *flags, f"-I{SHARED}", str(source), "-o", str(library)]
            _log.info("compiling kernels, once: %s", " ".join(command))
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise KernelsUnavailable(f"{program} does not compile the kernels: {_first_error(done.stderr)}")
            library.replace(target)
    except OSError as error:
        raise KernelsUnavailable(f"the kernels cannot be stored in {folder} ({error.strerror})") from error
    return target


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")
