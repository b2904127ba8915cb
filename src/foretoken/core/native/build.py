"""Compiles kernels once per instruction-set level and flags, with the machine's C++ compiler, and caches them on disk.

Without a compiler, or on a processor without the instructions, ``KernelsUnavailable`` is raised and torch operators
are the fallback.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from foretoken.core.files import cache_folder
from foretoken.core.native import cpu
from foretoken.core.native.cpu import Level

SHARED = Path(__file__).parent / "csrc"
SWITCH = "FORETOKEN_NATIVE"  # "0" disables the compiled kernels
_log = logging.getLogger(__name__)
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-w")


class KernelsUnavailable(Exception):
    """Compiled kernels cannot be used on this machine. The message says why."""


class KernelsDisabled(KernelsUnavailable):
    """Compiled kernels are switched off by FORETOKEN_NATIVE=0."""


def require() -> Level:
    """Returns the instruction-set level of compiled kernels. Raises KernelsUnavailable where there can be none."""
    if os.environ.get(SWITCH) == "0":
        raise KernelsDisabled(f"{SWITCH}=0 is set")
    level = cpu.chosen()
    if level is None:
        raise KernelsUnavailable(cpu.reason())
    return level


def compiler() -> str:
    """Returns the path of the C++ compiler. Raises KernelsUnavailable."""
    path = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if path is None:
        raise KernelsUnavailable(
            "there is no C++ compiler (c++, g++ or clang++); install one, for instance with 'apt install g++'"
        )
    return path


def compiled(source: Path, flags: Sequence[str], level: Level | None = None) -> Path:
    """Returns the shared library of one source file, from the cache or compiled now. See ``linked``."""
    return linked(source.stem, [(source, flags)], level)


def linked(name: str, sources: Sequence[tuple[Path, Sequence[str]]], level: Level | None = None) -> Path:
    """Returns a shared library of several source files, from the cache or built now.

    Object files are cached as well, so that libraries share them; those that are missing are compiled on all cores.

    Args:
        name: How the library's file name begins.
        sources: C++ files, each with its compiler flags in addition to the common ones. They may include headers beside
            them and in ``SHARED``.
        level: The instruction sets that may be used; None for those of this machine.

    Raises:
        KernelsUnavailable: There is no compiler, or it fails, or the cache cannot be written.
    """
    level = level or require()
    parts = [_Part.of(source, (*level.flags, *flags)) for source, flags in sources]
    key = hashlib.sha256(" ".join(part.name for part in parts).encode()).hexdigest()[:16]
    target = cache_folder() / "native" / f"{name}-{key}.so"
    if target.is_file():
        return target
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(_Part.build, parts))
    _build(target, ["-shared", "-pthread", *map(str, objects)])
    return target


class _Part(NamedTuple):
    """An object file, named by the content of its sources and its flags."""

    name: str
    arguments: list[str]

    @classmethod
    def of(cls, source: Path, flags: Sequence[str]) -> _Part:
        flags = (*_FLAGS, *flags)
        beside = sorted({*source.parent.glob("*.hpp"), *SHARED.glob("*.hpp"), source})
        text = b"\0".join([*(file.read_bytes() for file in beside), " ".join(flags).encode()])
        name = f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}.o"
        return cls(name, [*flags, "-c", f"-I{SHARED}", str(source)])

    def build(self) -> Path:
        target = cache_folder() / "native" / self.name
        _build(target, self.arguments)
        return target


def _build(target: Path, arguments: Sequence[str]) -> None:
    """Runs the compiler unless the file exists. It is written atomically, and by one process at a time."""
    program, folder = compiler(), target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(target), tempfile.TemporaryDirectory(dir=folder) as scratch:
            if target.is_file():
                return
            output = Path(scratch) / target.name
            command = [program, *arguments, "-o", str(output)]
            _log.info("compiling kernels, once: %s", " ".join(command))
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise KernelsUnavailable(f"{program} does not compile the kernels: {_first_error(done.stderr)}")
            output.replace(target)
    except OSError as error:
        raise KernelsUnavailable(f"the kernels cannot be stored in {folder} ({error.strerror})") from error


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Holds a lock on building this file: of several processes that need it, one compiles and the others wait."""
    import fcntl  # not on Windows, where there are no kernels

    lock = target.with_suffix(".lock")
    with lock.open("w") as file:
        with suppress(OSError):  # some network file systems have no locks: then several may compile
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")
