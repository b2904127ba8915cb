"""Provides the libraries of kernels: from the wheel, else compiled once per instruction set and cached on disk.

Its libraries are named by the content of their sources, so one that does not belong to these sources is not used.
Without one and without a compiler, or on a processor without the instructions, ``KernelsUnavailable`` is raised and
torch operators are the fallback. This module needs nothing but Python, because a wheel's build uses it.
"""

import hashlib
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from foretoken.core.files import cache_folder
from foretoken.core.native import cpu
from foretoken.core.native.cpu import Level
from foretoken.core.native.toolchain import Toolchain, local, local_suffix

COMPILING = "compiling kernels for this processor, once"
NOTICE = f"{COMPILING}; this takes a minute or two"
Watcher = Callable[[int, int], None]
"""Called with the numbers of finished files and of all files."""

_log = logging.getLogger(__name__)


class Compilation:
    """Counts the files that this process compiles. Its first file is logged unless a watcher shows the progress."""

    def __init__(self) -> None:
        self._lock, self._finished, self._files = Lock(), 0, 0
        self._watchers: list[Watcher] = []

    def begin(self, files: int) -> None:
        with self._lock:
            first, self._files = self._files == 0, self._files + files
        if first and not self._watchers:
            _log.info(NOTICE)
        self._report()

    def finish(self) -> None:
        with self._lock:
            self._finished += 1
        self._report()

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Calls ``watcher`` instead of earlier ones whenever a count changes within the ``with`` block."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def _report(self) -> None:
        if self._watchers:
            self._watchers[-1](self._finished, self._files)


compilation = Compilation()
"""The compilation of this process."""


SHARED = Path(__file__).parent / "csrc"
SHIPPED = Path(__file__).parents[2] / "_kernels"  # libraries of the wheel; a checkout has none
SWITCH = "FORETOKEN_NATIVE"  # "0" disables the compiled kernels
ANY = Level("any", (), frozenset(), ())  # of libraries that use no particular instructions

FLAGS = ("-O3", "-std=c++17", "-pthread", "-ffp-contract=off", "-fno-math-errno")
_INCLUDED = re.compile(rb'^\s*#\s*include "([^"]+)"', re.MULTILINE)
QUIET = "-w"  # tests compile with warnings as errors; compilers of users may know others

Sources = Sequence[tuple[Path, Sequence[str]]]  # C++ files, each with its flags in addition to the common ones


class KernelsUnavailable(Exception):
    """Compiled kernels cannot be used on this machine. The message says why."""


class KernelsDisabled(KernelsUnavailable):
    """Compiled kernels are switched off by FORETOKEN_NATIVE=0."""


def require() -> Level:
    """Returns the instruction-set level of compiled kernels. Raises KernelsUnavailable if there can be none."""
    if os.environ.get(SWITCH) == "0":
        raise KernelsDisabled(f"{SWITCH}=0 is set")
    level = cpu.chosen()
    if level is None:
        raise KernelsUnavailable(cpu.reason())
    return level


def toolchain() -> Toolchain:
    """Returns this machine's C++ compiler. Raises KernelsUnavailable."""
    tools = local()
    if tools is None:
        raise KernelsUnavailable(
            "there is no C++ compiler (c++, g++ or clang++); install one, for instance with 'apt install g++', or with "
            "\"pip install 'foretoken[compiler]'\""
        )
    return tools


def compiled(source: Path, flags: Sequence[str], level: Level | None = None) -> Path:
    """Returns the shared library of one source file, from the wheel, the cache or compiled now. See ``linked``."""
    return linked(source.stem, [(source, flags)], level)


def linked(
    name: str,
    sources: Sources,
    level: Level | None = None,
    whole: Sources | None = None,
    tools: Toolchain | None = None,
) -> Path:
    """Returns a shared library of several source files, from the wheel, the cache or built now.

    Object files are cached as well, so that libraries share them; those that are missing are compiled on all cores.
    Raises KernelsUnavailable if there is no compiler, or it fails, or the cache cannot be written.

    Args:
        name: Beginning of the library's file name.
        sources: C++ files with their flags. They include headers beside them, in ``-I`` folders and in ``SHARED``.
        level: The instruction sets that may be used; None for those of this machine.
        whole: Sources of the wheel's library of this name, if it has more than ``sources``.
        tools: Compiler, which is run wherever the cache has no library of its own; None for this machine's, which is
            run if the wheel has none either.
    """
    level = level or require()
    if tools is None and (path := shipped(name, whole or sources, level)):
        return path
    suffix = tools.suffix if tools else local_suffix()
    parts = [_ObjectFile.of(source, (*level.flags, *flags)) for source, flags in sources]
    folder = cache_folder() / "native" / (tools.folder if tools else "")
    target = folder / f"{name}-{_key(part.name for part in parts)}{suffix}"
    if target.is_file():
        return target
    tools = tools or toolchain()
    missing = [part for part in parts if not (folder / part.name).is_file()]
    compilation.begin(len(missing))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda part: part.build(folder, tools), missing))
    objects = (str(folder / part.name) for part in parts)
    _build(target, [*tools.command, "-shared", "-pthread", *tools.linking, *objects])
    return target


def shipped(name: str, sources: Sources, level: Level) -> Path | None:
    """Returns the wheel's library that is compiled from these very sources; None if there is none."""
    path = SHIPPED / shipped_name(name, sources, level, local_suffix()) if SHIPPED.is_dir() else None
    return path if path and path.is_file() else None


def shipped_name(name: str, sources: Sources, level: Level, suffix: str) -> str:
    """Returns the name of a library in a wheel, which identifies the content of its sources and its flags."""
    parts = (_ObjectFile.of(source, (*level.flags, *flags)).name for source, flags in sources)
    return f"{name}-{level.name}-{_key(parts)}{suffix}"


def _with_headers(source: Path, flags: Sequence[str]) -> list[bytes]:
    """Returns the contents of a source file and of all headers that it includes, directly or not, in a fixed order."""
    contents: dict[Path, bytes] = {}
    pending, folders = [source], [Path(flag[2:]) for flag in flags if flag.startswith("-I")]
    while pending:
        file = pending.pop()
        if file not in contents:
            contents[file] = file.read_bytes()
            names = [match.decode() for match in _INCLUDED.findall(contents[file])]
            searched = [file.parent, *folders]
            pending += [
                next((path for folder in searched if (path := folder / name).is_file()), SHARED / name)
                for name in names
            ]
    return list(contents.values())


def _key(names: Iterator[str]) -> str:
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]


class _ObjectFile(NamedTuple):
    """An object file, named by the content of its sources and its flags."""

    name: str
    arguments: list[str]

    @classmethod
    def of(cls, source: Path, flags: Sequence[str]) -> "_ObjectFile":
        flags = (*FLAGS, QUIET, *flags)
        text = b"\0".join([*_with_headers(source, flags), " ".join(flags).encode()])
        name = f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}.o"
        return cls(name, [*flags, "-c", f"-I{SHARED}", str(source)])

    def build(self, folder: Path, tools: Toolchain) -> None:
        try:
            _build(folder / self.name, [*tools.command, *tools.compiling, *self.arguments])
        finally:
            compilation.finish()


def _build(target: Path, command: Sequence[str]) -> None:
    """Runs the compiler unless the file exists. It is written atomically, and by one process at a time."""
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(target), tempfile.TemporaryDirectory(dir=folder) as scratch:
            if target.is_file():
                return
            output = Path(scratch) / target.name
            _log.debug("%s", " ".join([*command, "-o", str(output)]))
            done = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise KernelsUnavailable(f"{command[0]} does not compile the kernels: {_first_error(done.stderr)}")
            output.replace(target)
    except OSError as error:
        raise KernelsUnavailable(f"the kernels cannot be stored in {folder} ({error.strerror})") from error


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Holds a lock on building this file: of several processes that need it, one compiles and the others wait."""
    try:
        import fcntl
    except ImportError:  # Windows: several may compile, and the last one's file stays
        yield
        return
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
