"""The kernels compile without warnings. Users' compilers are silent (``build.QUIET``), whatever they warn about."""

import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretoken.core.files import cache_folder
from foretoken.core.native import build
from foretoken.models.runners.native.build import CACHES, Kind, ScaleKind, decoder_sources, grouped_kind

from .emulated import SOURCES, level_of

WARNINGS = ("-Wall", "-Wextra", "-Werror")
COMPILERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # program, and its own flags
    "g++": (("g++",), ("-Wshadow=local", "-fsyntax-only")),
    "clang++": (("clang++",), ("-fsyntax-only",)),
    "zig": ((sys.executable, "-m", "ziglang", "c++"), ("-O0", "-c")),  # -fsyntax-only alone fails
}
# The instruction sets with the most and the least code of their own, with kinds of weights and caches that differ most.
SETS = {
    "amx": ([Kind.BFLOAT16, Kind.INT8, Kind.PACKED, Kind.GROUPED], [Kind.BFLOAT16]),
    "generic": ([Kind.FLOAT32, grouped_kind(6, True, ScaleKind.TWO_LEVELS)], [Kind.INT8]),
}


def errors(compiler: str, source: Path, flags: Sequence[str], output: Path) -> str:
    """Returns the compiler's messages about one source; that it has none is cached by content, as object files are."""
    program, own = COMPILERS[compiler]
    version = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True).stdout
    name = build._ObjectFile.of(source, (*program, version, *flags, *WARNINGS, *own)).name
    clean = cache_folder() / "native" / "warnings" / name.replace(".o", ".clean")
    if clean.exists():
        return ""
    command = [*program, *build.FLAGS, *flags, *WARNINGS, *own, f"-I{build.SHARED}", str(source)]
    if "-c" in own:
        command += ["-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr
    clean.parent.mkdir(parents=True, exist_ok=True)
    clean.touch()
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", SETS)
def test_kernels_compile_without_warnings(name: str, compiler: str, tmp_path: Path) -> None:
    if not (importlib.util.find_spec("ziglang") if compiler == "zig" else shutil.which(compiler)):
        pytest.skip(f"{compiler} is not installed")
    level, (kinds, caches) = level_of(name), SETS[name]
    if platform.machine() not in level.machines:
        pytest.skip(f"compilers here are not for {level.machines[0]}")
    sources = [(path, (*level.flags, *flags)) for path, flags in decoder_sources(kinds, caches)]
    sources += [(SOURCES / "packing.cpp", level.flags), (build.SHARED / "sampling.cpp", level.flags)]
    sources += [(build.SHARED / "pool.cpp", ())]
    with ThreadPoolExecutor(2) as workers:
        numbered = list(enumerate(sources))
        found = list(workers.map(lambda one: errors(compiler, *one[1], tmp_path / f"{one[0]}.o"), numbered))
    assert not any(found), "\n".join(found)


def test_all_sources_are_compiled() -> None:
    """A source that no set above has would not be looked at."""
    compiled = {path for path, _ in decoder_sources(Kind, CACHES)} | {SOURCES / "packing.cpp"}
    assert compiled == set(SOURCES.glob("*.cpp"))
    assert {build.SHARED / "pool.cpp", build.SHARED / "sampling.cpp"} == set(build.SHARED.glob("*.cpp"))
