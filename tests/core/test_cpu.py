"""Features of processors, and the choice of an instruction-set level."""

import ctypes
import mmap
import platform
import sys
from pathlib import Path

import pytest

from foretoken.core.errors import InvalidRequest
from foretoken.core.native import cpu
from foretoken.core.native.build import KernelsUnavailable, require
from foretoken.core.native.cpu import Leaf, cpuid_at, from_cpuid, from_cpuinfo, from_sysctl, read_features


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
    monkeypatch.setattr(cpu, "Path", lambda _: info)
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


M1 = {"hw.optional.neon": 1, "hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_I8MM": 0}
INTEL_MAC = {
    **dict.fromkeys(("hw.optional.avx2_0", "hw.optional.fma", "hw.optional.f16c"), 1),
    **{f"hw.optional.avx512{part}": 0 for part in ("f", "cd", "dq", "bw", "vl", "ifma", "vbmi")},
}
ZEN_4 = {  # an AMD EPYC
    (0, 0): Leaf(0x10, 0x68747541, 0x444D4163, 0x69746E65),
    (1, 0): Leaf(0xA10F11, 0x20800, 0xFFFA3203, 0x178BFBFF),
    (7, 0): Leaf(0x1, 0xF1BF07AB, 0x405FC6, 0x10),
    (7, 1): Leaf(0x20, 0, 0, 0),
}
WITH_AVX512, WITH_AVX, WITHOUT = 0xE7, 0x7, 0x3  # registers that the system saves


def best(features: frozenset[str], machine: str) -> str:
    """Returns the level that such a processor takes."""
    return next(level.name for level in cpu.LEVELS if machine in level.machines and features >= level.features)


@pytest.mark.parametrize(
    ("answers", "machine", "level"), [(M1, "arm64", "neon-dotprod"), (INTEL_MAC, "x86_64", "avx2")]
)
def test_features_of_macos_are_read_by_sysctl(answers: dict[str, int], machine: str, level: str) -> None:
    assert best(from_sysctl(answers.get), machine) == level


@pytest.mark.parametrize(
    ("saved", "level"), [(WITH_AVX512, "avx512-bf16"), (WITH_AVX, "avx2"), (WITHOUT, "generic")], ids=str
)
def test_on_windows_a_level_needs_the_registers_that_the_system_saves(saved: int, level: str) -> None:
    assert best(from_cpuid(lambda *place: ZEN_4[place], saved), "AMD64") == level


def test_old_processors_are_not_asked_for_unknown_leaves() -> None:
    known = {(0, 0): Leaf(2, 0, 0, 0), (1, 0): Leaf(0, 0, 0, 0)}
    assert from_cpuid(lambda *place: known[place], WITH_AVX) == frozenset()


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="compares with Linux's list")
def test_cpuid_reports_the_features_that_linux_lists() -> None:
    try:
        memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        pytest.skip("no executable memory here")
    listed = from_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"), "x86_64")
    saved = WITH_AVX512 if "avx512f" in listed else WITH_AVX if "avx" in listed else WITHOUT
    found = from_cpuid(cpuid_at(ctypes.addressof(ctypes.c_char.from_buffer(memory))), saved)
    assert found == {name for name in listed if name in cpu._CPUID}


@pytest.mark.parametrize(
    ("system", "features"), [("darwin", {"asimd", "asimddp"}), ("win32", set()), ("linux", {"fp", "asimd"})]
)
def test_features_are_read_in_the_way_of_each_system(system, features, monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nFeatures\t: fp asimd\n", encoding="utf-8")
    monkeypatch.setattr(cpu, "Path", lambda _: info)
    monkeypatch.setattr(cpu, "sysctl", M1.get)
    monkeypatch.setattr(platform, "machine", lambda: "ARM64" if system == "win32" else "arm64")
    monkeypatch.setattr(sys, "platform", system)
    assert read_features() == features
