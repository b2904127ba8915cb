"""The kernels of aarch64, which an emulator runs: products, the pool, sampling, and passes of a tiny decoder."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from foretoken.core.native import build, cpu
from foretoken.core.native.toolchain import Toolchain, local_suffix
from foretoken.models.runners.native.build import CACHES, Kind, ScaleKind, decoder_sources, grouped_kind

from .products import PRODUCTS, SOURCES

HERE = Path(__file__).parent
COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
CROSS = Toolchain((COMPILER,), ".so", ("-fPIC",), folder="aarch64-linux-gnu")
KINDS = (  # those that cases.cpp has
    Kind.FLOAT32,
    Kind.BFLOAT16,
    Kind.INT8,
    Kind.PACKED,
    grouped_kind(4, False, ScaleKind.HALF),
    grouped_kind(8, False, ScaleKind.HALF),
    grouped_kind(4, True, ScaleKind.SINGLE),
    grouped_kind(6, False, ScaleKind.TWO_LEVELS),
    grouped_kind(4, True, ScaleKind.TWO_LEVELS),
    grouped_kind(6, True, ScaleKind.TWO_LEVELS),
)
FLOATS = (Kind.FLOAT32, Kind.BFLOAT16)


def level_of(name: str) -> cpu.Level:
    return next(level for level in cpu.LEVELS if level.name == name)


def output(level: cpu.Level, folder: Path, tools: Toolchain | None = None) -> str:
    """Returns what the cases print with kernels of a level."""
    command = tools.command if tools else build.toolchain().command
    products = [
        PRODUCTS,
        *((SOURCES / "kind.cpp", (f"-DFORETOKEN_KIND={kind:d}",)) for kind in KINDS),
    ]
    libraries = (
        build.linked("pool", [(build.SHARED / "pool.cpp", ())], build.ANY, tools=tools),
        build.linked("cases", [(HERE.parent / "core" / "pool_cases.cpp", ())], build.ANY, tools=tools),
        build.linked("packing", [(SOURCES / "packing.cpp", ())], level, tools=tools),
        build.linked("products", products, level, tools=tools),
        build.linked("decoder", decoder_sources(FLOATS, CACHES), level, tools=tools),
        build.linked("sampling", [(build.SHARED / "sampling.cpp", ())], level, tools=tools),
    )
    program = folder / level.name
    flags = ("-O1", "-std=c++17", "-w", "-ffp-contract=off", f"-I{build.SHARED}", f"-I{SOURCES}")
    subprocess.run([*command, *flags, str(HERE / "cross" / "cases.cpp"), "-o", str(program), "-ldl"], check=True)
    run = (EMULATOR, "-L", SYSTEM) if tools else ()
    done = subprocess.run([*run, str(program), *map(str, libraries)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(COMPILER), reason=f"{COMPILER} is not installed")
@pytest.mark.skipif(not shutil.which(EMULATOR), reason=f"{EMULATOR} is not installed")
@pytest.mark.skipif(local_suffix() != ".so", reason="needs Linux")
def test_emulated_kernels_are_right_and_give_the_bits_of_avx2(tmp_path: Path) -> None:
    """Sums are in the same order on both, and both multiply and add with one rounding."""
    dot, plain = (output(level_of(name), tmp_path, CROSS) for name in ("neon-dotprod", "neon"))
    assert dot == plain and len(plain.splitlines()) > 20
    if level_of("avx2") in cpu.available():
        assert output(level_of("avx2"), tmp_path) == plain
