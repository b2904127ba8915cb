"""Compiling kernels: once per machine and set of flags, kept on disk, with whatever C++ compiler is there.

Without a compiler, or on a CPU without AVX-512, ``Unavailable`` says why, and what is made of torch operators serves.
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
SWITCH = "FORETOKEN_NATIVE"  # "0" keeps the compiled kernels out
REQUIRED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
_log = logging.getLogger(__name__)
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-w")


class Unavailable(Exception):
    """Why the compiled kernels cannot serve here, in words."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What the processor can do, by the names of /proc/cpuinfo; empty where that cannot be read."""
    if platform.machine() not in ("x86_64", "AMD64") or not Path("/proc/cpuinfo").is_file():
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def require(*features: str) -> None:
    """Raises ``Unavailable`` where kernels are switched off or the processor lacks one of these."""
    if os.environ.get(SWITCH) == "0":
        raise Unavailable(f"{SWITCH}=0 is set")
    if lost := sorted({*REQUIRED, *features} - cpu_flags()):
        raise Unavailable(f"the processor lacks {', '.join(lost)}")


def compiled(source: Path, flags: Sequence[str]) -> Path:
    """The shared library of ``source``, from the cache or made now; a half-written one is never seen.

    It may include what lies beside it and in ``SHARED``. flags: beside those that all have. Raises ``Unavailable``.
    """
    flags = (*_FLAGS, *(f"-m{name}" for name in REQUIRED), *flags)
    beside = sorted({*source.parent.glob("*.hpp"), *SHARED.glob("*.hpp"), source})
    text = b"\0".join([*(file.read_bytes() for file in beside), " ".join(flags).encode()])
    folder = cache_folder() / "native"
    target = folder / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if target.is_file():
        return target
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable("there is no C++ compiler (c++, g++ or clang++)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / target.name
            command = [compiler, *flags, f"-I{SHARED}", str(source), "-o", str(made)]
            _log.info("compiling kernels, once: %s", " ".join(command))
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
