"""The kernels of aarch64 and of Windows in emulators: products, threads, sampling, and passes of a tiny decoder."""

import shutil
from pathlib import Path

import pytest

from foretoken.core.native import cpu
from foretoken.core.native.toolchain import PLATFORMS, Toolchain, cross, local_suffix

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


TOOLS = cross(PLATFORMS["windows-x86_64"])
WINE = next((found for name in ("wine64", "wine", "/usr/lib/wine/wine64") if (found := shutil.which(name))), None)


@pytest.mark.slow
@pytest.mark.skipif(TOOLS is None, reason="ziglang is not installed")
@pytest.mark.skipif(WINE is None, reason="Wine is not installed")
@pytest.mark.skipif(local_suffix() != ".so", reason="needs Linux")
@pytest.mark.skipif(level_of("avx2") not in cpu.available(), reason="needs AVX2")
def test_kernels_for_windows_give_the_bits_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINEPREFIX", str(tmp_path / "wine"))
    monkeypatch.setenv("WINEDEBUG", "-all")
    assert TOOLS is not None and WINE is not None
    found = output(level_of("avx2"), TOOLS, (WINE,))
    assert found.splitlines() == output(level_of("avx2")).splitlines()
