"""The choice of an instruction-set level."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from foretoken.core.errors import InvalidRequest
from foretoken.core.native import cpu, processor
from foretoken.core.native.build import KernelsUnavailable, require


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AVX-512 and VNNI."""
    level = next(level for level in cpu.LEVELS if level.name == "avx512-vnni")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "features", lambda: level.features | {"sse2"})
    monkeypatch.delenv(cpu.VARIABLE, raising=False)


def test_names_are_unique() -> None:
    names = [level.name for level in cpu.LEVELS]
    assert len(set(names)) == len(names)


def test_flags_are_the_compilers() -> None:
    levels = {level.name: level.flags for level in cpu.LEVELS}
    assert set(levels["amx"]) >= {"-mavx2", "-mf16c", "-mavx512f", "-mavx512vnni", "-mavx512vbmi", "-mamx-tile"}
    assert "-march=native" not in {flag for flags in levels.values() for flag in flags}


@pytest.mark.usefixtures("server")
def test_the_best_level_is_taken() -> None:
    level = cpu.chosen()
    assert level is not None and level.name == "avx512-vnni"
    assert "avx512-bf16 needs avx512_bf16, avx512vbmi" in cpu.reason()


@pytest.mark.usefixtures("server")
def test_a_lower_level_is_taken_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.VARIABLE, "avx512")
    assert require().name == "avx512"
    assert cpu.reason() == "FORETOKEN_CPU is set"


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("name, message", [("sse9", "sse9 is not known; this"), ("avx512-bf16", "needs avx512_bf16, ")])
def test_a_level_that_cannot_run_is_refused(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.VARIABLE, name)
    with pytest.raises(InvalidRequest, match=message) as caught:
        cpu.chosen()
    assert "can run avx512-vnni, avx512" in str(caught.value)


def test_any_x86_processor_runs_the_generic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "features", frozenset)
    assert require().name == "generic"


@pytest.mark.parametrize(
    "features, name, why",
    [
        ("fp asimd crc32", "neon", "neon-dotprod needs asimddp"),
        ("fp asimd asimddp sve", "neon-dotprod", "the best level"),
    ],
)
def test_levels_of_aarch64(features: str, name: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nFeatures\t: {features}\nCPU implementer\t: 0x41\n", encoding="utf-8")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(processor, "Path", lambda _: info)
    monkeypatch.setattr(cpu, "features", cpu.features.__wrapped__)
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    assert require().name == name
    assert why in cpu.reason()


def test_an_architecture_without_kernels_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(KernelsUnavailable, match="no kernels for riscv64"):
        require()


def test_the_reason_is_reported_without_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LEVELS", cpu.LEVELS[:1])
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "features", frozenset)
    with pytest.raises(KernelsUnavailable, match="avx2"):
        require()
