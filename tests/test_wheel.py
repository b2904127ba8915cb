"""The wheel and the sdist: what is in them, and that an installed wheel runs where there is no compiler."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.sdist import SdistBuilder

from foretoken import zoo
from foretoken.core.native.build import KernelsUnavailable, require, toolchain

ROOT = Path(__file__).parents[1]
PACKAGE = {
    str(path.relative_to(ROOT / "src"))
    for path in (ROOT / "src" / "foretoken").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}


def built(folder: Path, **variables: str) -> Path:
    """Builds the wheel. Returns its path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=True, capture_output=True, text=True)
    (path,) = folder.iterdir()
    return path


def has_compiler() -> bool:
    try:
        require()
        toolchain()
    except KernelsUnavailable:
        return False
    return True


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with the kernels of this machine's level, compiled by its own compiler: object files are shared."""
    if not has_compiler():
        pytest.skip("no kernels or no compiler")
    return built(tmp_path_factory.mktemp("dist"), FORETOKEN_WHEEL="here", FORETOKEN_WHEEL_LEVELS=require().name)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment that has the wheel, and this environment's packages behind it."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--prefix", str(folder)]
    options = ["-q", "--no-deps", "--no-compile", "--ignore-installed"]
    subprocess.run([*install, *options, str(wheel)], check=True, capture_output=True)
    (packages / "others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return folder / "bin"


def alone(scripts: Path, cache: Path) -> dict[str, str]:
    """The environment of a machine that has nothing but the wheel."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FORETOKEN_", "PYTHON"))}
    return kept | {"PATH": str(scripts), "FORETOKEN_CACHE": str(cache)}


def run(scripts: Path, cache: Path, *arguments: str) -> Any:
    command = [str(scripts / "python"), str(scripts / "foretoken"), *arguments, "--json"]
    done = subprocess.run(command, env=alone(scripts, cache), cwd=cache, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_an_installed_wheel_runs_its_kernels_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    kernels = run(installed, tmp_path, "info")["kernels"]
    assert (kernels["runner"], kernels["libraries"]) == ("compiled", "prebuilt, from the wheel")
    demo = run(installed, tmp_path, "demo", "--size", "none", "--prompts", "1", "--max-tokens", "24")
    assert demo
    assert not list(tmp_path.glob("native/*"))


@pytest.mark.slow
def test_the_wheel_has_the_whole_package_and_its_kernels(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    kernels = {name for name in names if name.startswith("foretoken/_kernels/")}
    assert names >= PACKAGE
    assert {name.split("/")[-1].split("-")[0] for name in kernels} == {"decoder", "packing", "pool", "sampling"}
    assert "-py3-none-" in wheel.name
    assert "-any" not in wheel.name


@pytest.mark.slow
def test_the_benchmark_of_a_wheel_compares_its_kernels(wheel: Path, tmp_path: Path) -> None:
    arguments = ["--scheme", "int8", "--rows", "3", "--context", "8", "--turns", "2", "--output"]
    program, result = ROOT / "benchmarks" / "schemes.py", tmp_path / "result.json"
    command = [sys.executable, str(program), "--wheel", str(wheel), "--target", str(zoo.path("draft"))]
    command += [*arguments, str(result)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled, wheel_passes = json.loads(result.read_text())["times"]
    assert (wheel_passes["rows"], wheel_passes["same_bits"]) == (3, True) and compiled["rows"] == 3


def test_a_wheel_that_is_not_asked_for_kernels_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delenv("FORETOKEN_WHEEL", raising=False)
    from build_kernels import KernelsHook

    asked: dict[str, Any] = {}
    hook = KernelsHook(str(ROOT), {}, None, None, "", "wheel")
    hook.initialize("standard", asked)
    assert (asked, hook.dependencies()) == ({}, [])
    monkeypatch.setenv("FORETOKEN_WHEEL", "linux-x86_64")
    assert hook.dependencies() == ["ziglang>=0.14"]
    hook.initialize("editable", asked)
    assert asked == {}


def test_the_sdist_has_what_a_wheel_is_built_from() -> None:
    names = {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    assert {f"src/{name}" for name in PACKAGE} <= names
    assert {"build_kernels.py", "Makefile", "tests/test_wheel.py"} <= names
