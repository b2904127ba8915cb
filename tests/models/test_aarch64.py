"""The kernels of aarch64, which an emulator runs: products, the pool, sampling, and passes of a tiny decoder."""

from __future__ import annotations

import shutil

import pytest

from foretoken.core.native import cpu
from foretoken.core.native.toolchain import Toolchain, local_suffix

from .emulated import level_of, output

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
CROSS = Toolchain((COMPILER,), ".so", ("-fPIC",), folder="aarch64-linux-gnu")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(COMPILER), reason=f"{COMPILER} is not installed")
@pytest.mark.skipif(not shutil.which(EMULATOR), reason=f"{EMULATOR} is not installed")
@pytest.mark.skipif(local_suffix() != ".so", reason="needs Linux")
def test_emulated_kernels_are_right_and_give_the_bits_of_avx2() -> None:
    """Sums are in the same order on both, and both multiply and add with one rounding."""
    run = (EMULATOR, "-L", SYSTEM)
    dot, plain = (output(level_of(name), CROSS, run) for name in ("neon-dotprod", "neon"))
    assert dot == plain and len(plain.splitlines()) > 20
    if level_of("avx2") in cpu.available():
        assert output(level_of("avx2")) == plain
