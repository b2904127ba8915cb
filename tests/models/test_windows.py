"""The kernels of Windows, compiled by Zig and run by Wine: products, threads, sampling, passes of a tiny decoder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from foretoken.core.native import cpu
from foretoken.core.native.toolchain import PLATFORMS, cross, local_suffix

from .emulated import level_of, output

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
