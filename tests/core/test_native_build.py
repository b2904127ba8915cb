"""Compiling kernels: what is cached, what libraries share, and processes that need the same file at once."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretoken.core.native import build, toolchain
from foretoken.core.native.build import NOTICE, Compilation, linked, shipped_name
from foretoken.core.native.cpu import LEVELS
from foretoken.core.native.toolchain import PLATFORMS
from foretoken.models.runners.native.build import build_wheel_kernels, newest_glibc

SOURCE = Path(__file__).parents[2] / "src"
COMPILER = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """An empty cache, and a compiler that writes down what it was called for. Returns its calls, each a file's stem."""
    log, folder = tmp_path / "log", tmp_path / "bin"
    folder.mkdir()
    wrapper = folder / "c++"
    wrapper.write_text(f'#!/bin/sh\nfor last; do :; done\necho "$last" >>{log}\nexec {COMPILER} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    return lambda: sorted(Path(line).name.rsplit("-", 1)[0] for line in log.read_text().splitlines())


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> Compilation:
    """The progress of a process that has compiled nothing."""
    fresh = Compilation()
    monkeypatch.setattr(build, "compilation", fresh)
    return fresh


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "sources"
    folder.mkdir()
    files = [folder / f"{name}.cpp" for name in ("one", "two", "three")]
    for file in files:
        file.write_text(f'extern "C" int {file.stem}() {{ return VALUE; }}\n')
    return files


def test_libraries_share_object_files(calls: Callable[[], list[str]], sources: list[Path]) -> None:
    one, two, three = sources
    first = ctypes.CDLL(str(linked("first", [(one, ["-DVALUE=1"]), (two, ["-DVALUE=2"])])))
    second = ctypes.CDLL(str(linked("second", [(two, ["-DVALUE=2"]), (three, ["-DVALUE=3"])])))
    assert (first.one(), first.two(), second.two(), second.three()) == (1, 2, 2, 3)
    assert calls() == ["first", "one", "second", "three", "two"]


def test_other_flags_and_other_content_are_other_files(calls: Callable[[], list[str]], sources: list[Path]) -> None:
    one = sources[0]
    assert ctypes.CDLL(str(linked("x", [(one, ["-DVALUE=1"])]))).one() == 1
    assert ctypes.CDLL(str(linked("x", [(one, ["-DVALUE=5"])]))).one() == 5
    one.write_text('extern "C" int one() { return 10 * VALUE; }\n')
    assert ctypes.CDLL(str(linked("x", [(one, ["-DVALUE=5"])]))).one() == 50
    assert calls() == ["one"] * 3 + ["x"] * 3


def test_one_of_several_threads_compiles_a_library(calls: Callable[[], list[str]], sources: list[Path]) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: linked("x", [(sources[0], ["-DVALUE=1"])]), range(4)))
    assert len(set(paths)) == 1
    assert calls() == ["one", "x"]
    assert sorted(file.suffix for file in paths[0].parent.iterdir()) == [".o", ".so"]


def test_a_library_of_the_wheel_is_taken_if_it_has_these_sources(calls, sources, tmp_path, monkeypatch):
    one, two, _ = sources
    few, whole = [(one, ["-DVALUE=1"])], [(one, ["-DVALUE=1"]), (two, ["-DVALUE=2"])]
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "shipped")
    build.SHIPPED.mkdir()
    path = build.SHIPPED / shipped_name("x", whole, build.ANY, ".so")
    linked("x", whole, build.ANY).rename(path)
    assert linked("x", few, build.ANY, whole) == path
    assert linked("x", few, build.ANY) != path  # the wheel has no library of this one alone
    assert calls() == ["one", "two", "x", "x"]
    two.write_text('extern "C" int two() { return 20; }\n')
    assert linked("x", few, build.ANY, whole) != path  # the sources were edited


def test_compiling_is_one_line_of_the_log(calls, sources, caplog, compilation):
    caplog.set_level(logging.DEBUG, logger="foretoken")
    linked("x", [(source, ["-DVALUE=1"]) for source in sources])
    linked("y", [(sources[0], ["-DVALUE=2"])])
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO] == [NOTICE]
    assert sum("-DVALUE=" in record.getMessage() for record in caplog.records) == 4  # for debugging


def test_a_watcher_sees_every_file_and_replaces_the_line(calls, sources, caplog, compilation):
    caplog.set_level(logging.INFO, logger="foretoken")
    seen: list[tuple[int, int]] = []
    with compilation.watched(lambda finished, files: seen.append((finished, files))):
        linked("x", [(source, ["-DVALUE=1"]) for source in sources[:2]])
        linked("y", [(source, ["-DVALUE=1"]) for source in sources])  # two of them are cached
        linked("y", [(source, ["-DVALUE=1"]) for source in sources])
    assert seen == [(0, 2), (1, 2), (2, 2), (2, 3), (3, 3)] and caplog.records == []


def test_a_file_that_fails_is_finished(calls, sources, compilation):
    seen: list[tuple[int, int]] = []
    sources[0].write_text("no C++")
    with (
        compilation.watched(lambda finished, files: seen.append((finished, files))),
        pytest.raises(build.KernelsUnavailable, match="does not compile the kernels"),
    ):
        linked("x", [(sources[0], [])])
    assert seen == [(0, 1), (1, 1)]


def found_compiler(path: Path, *packages: Path) -> tuple[int, str]:
    """Returns the exit code and output of ``python -m foretoken.core.native.toolchain`` with these folders alone."""
    environment = {"PATH": str(path), "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, *packages)))}
    command = [sys.executable, "-S", "-m", "foretoken.core.native.toolchain"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_make_asks_for_the_compiler_that_compiles(calls: Callable[[], list[str]], tmp_path: Path) -> None:
    assert found_compiler(tmp_path / "bin") == (0, f"{tmp_path / 'bin' / 'c++'}\n")
    empty, packages = tmp_path / "empty", tmp_path / "packages"
    empty.mkdir()
    assert found_compiler(empty) == (1, "")
    (packages / "ziglang").mkdir(parents=True)
    assert found_compiler(empty, packages) == (0, f"{sys.executable} -m ziglang c++\n")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("code, installed", [(0, False), (1, True)])
def test_make_installs_a_compiler_where_there_is_none(tmp_path: Path, code: int, installed: bool) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    python, log = tmp_path / "venv" / "bin" / "python", tmp_path / "log"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >>{log}\ncase "$*" in *native.toolchain) exit {code};; esac\n')
    python.chmod(0o755)
    makefile = SOURCE.parent / "Makefile"
    command = ["make", "-f", str(makefile), f"PYTHON={sys.executable}", "VENV=venv", "venv/.installed-runtime"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert (".[compiler]" in log.read_text()) is installed


def test_zig_is_the_compiler_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert toolchain.local() is None
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: name)
    tools = toolchain.local()
    assert tools is not None
    assert tools.command[1:] == ("-m", "ziglang", "c++")


def test_a_compiler_for_windows_is_not_given_flags_of_unix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: name)
    flags = {name: toolchain.cross(platform) for name, platform in PLATFORMS.items()}
    assert [name for name, tools in flags.items() if tools and "-fPIC" not in tools.compiling] == ["windows-x86_64"]


@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS)
def test_every_platform_of_wheels_has_levels(platform: toolchain.Platform) -> None:
    levels = {level.name for level in LEVELS if platform.machine in level.machines}
    assert set(platform.without) < levels


@pytest.mark.parametrize("name, levels, message", [("amiga", (), "no platform"), ("here", ("mmx",), "no level mmx")])
def test_unknown_platforms_and_levels_of_wheels_are_refused(name: str, levels: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_wheel_kernels(name, levels)


def test_the_newest_glibc_is_found() -> None:
    assert newest_glibc(b"\0GLIBC_2.4\0GLIBC_2.28\0GLIBC_2.3.4\0") == (2, 28)
    assert newest_glibc(b"MZ") == (0, 0)
