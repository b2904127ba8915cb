"""Kernels compiled with sanitizers, by g++: for memory and arithmetic ("address"), or races ("thread")."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from foretoken.core.native import build
from foretoken.core.native.cpu import Level
from foretoken.core.native.toolchain import Toolchain, local_suffix
from foretoken.models.runners.native import packing

_ARITHMETIC = "signed-integer-overflow,shift,bounds,integer-divide-by-zero,float-cast-overflow"
FLAGS = {
    # Calls in the place of inlined checks, and no checks of null and alignment, which compile for five times as long.
    "address": (
        "-fsanitize=address",
        "--param=asan-instrumentation-with-call-threshold=0",
        f"-fsanitize={_ARITHMETIC}",
    ),
    "thread": ("-fsanitize=thread",),
}
RUNTIMES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:halt_on_error=1",  # Python never frees all
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Threads of the pool live as long as the process. The suppressed reads are explained in csrc/pool.hpp.
    "TSAN_OPTIONS": f"halt_on_error=1:report_thread_leaks=0:suppressions={Path(__file__).with_name('tsan.txt')}",
}


def toolchain(name: str) -> Toolchain:
    """Returns the compiler with the sanitizer's flags; its files have a folder of their own. Skips without either."""
    runtimes(name)
    command = (shutil.which("g++") or "", *FLAGS[name], "-fno-sanitize-recover=all")
    return Toolchain(command, ".so", ("-fPIC", "-g1", "-fno-omit-frame-pointer"), folder=name)


def runtimes(name: str) -> list[str]:
    """Returns the libraries that a process needs which loads such kernels. Skips where one is missing."""
    if local_suffix() != ".so" or not shutil.which("g++"):
        pytest.skip("sanitizers need Linux and g++")
    found = []
    for library in RUNTIMES[name]:
        command = ["g++", f"-print-file-name={library}"]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        if not Path(found[-1]).is_absolute():
            pytest.skip(f"{library} of g++ is not installed")
    return found


def level() -> Level:
    """Returns this machine's instructions, compiled with little optimization. Skips where there are no kernels."""
    try:
        own = build.require()
    except build.KernelsUnavailable as reason:
        pytest.skip(f"no compiled kernels here: {reason}")
    return own._replace(flags=(*own.flags, "-O1"))


def load_sanitized() -> None:
    """Has this process, which must have been started by ``python``, compile and load kernels with AddressSanitizer."""
    linked, tools = build.linked, toolchain("address")
    os.environ.pop("LD_PRELOAD", None)  # for the compiler, which runs without

    def sanitized(name: str, sources: build.Sources, level_: Level | None = None, *_: object) -> Path:
        own = level_ if level_ == build.ANY else level()
        return linked(name, sources, own, tools=tools)

    build.linked = sanitized  # type: ignore[assignment]
    packing.CHUNK_BYTES = 0  # so that it knows the bounds of each matrix


def python(module: str, *arguments: str, seconds: float = 3000) -> str:
    """Runs a module of the tests in a process with the runtime of AddressSanitizer. Returns its output."""
    environment = {"LD_PRELOAD": ":".join(runtimes("address")), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return run([sys.executable, "-m", module, *arguments], environment, seconds)


def run(command: list[str], environment: Mapping[str, str] | None = None, seconds: float = 600) -> str:
    """Returns the output of a program that must succeed: a finding of a sanitizer ends it with an error."""
    done = subprocess.run(
        command,
        env={**os.environ, **OPTIONS, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout
