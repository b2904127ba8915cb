"""Environments of clients, installed from their lists into the cache folder when a test first needs them."""

import hashlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from foretoken.core.files import cache_folder

HERE = Path(__file__).parent
PATIENCE = 600  # seconds of an installation


def python(name: str) -> list[str]:
    """Returns the command that runs ``name``.py with the packages of ``name``.txt, which lists all that they need."""
    listed = HERE / f"{name}.txt"

    def install(folder: Path) -> None:
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        _run([*pip, "--no-compile", "--no-deps", "-r", str(listed)], folder)

    folder = _installed(name, [listed], install)
    return [str(folder / "bin" / "python"), str(HERE / f"{name}.py")]


def node() -> list[str]:
    """Returns the command that runs node.mjs with the packages of package-lock.json. Skips the test without Node."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    listed = [HERE / "package.json", HERE / "package-lock.json"]

    def install(folder: Path) -> None:
        for file in listed:
            shutil.copy(file, folder)
        _run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)

    folder = _installed("node", listed, install)
    shutil.copy(HERE / "node.mjs", folder)  # modules are looked for beside it
    return ["node", str(folder / "node.mjs")]


def _installed(name: str, listed: Sequence[Path], install: Callable[[Path], None]) -> Path:
    """Returns the folder of an environment, which ``install`` fills if no test did so before."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in listed)).hexdigest()[:12]
    place = cache_folder() / "clients" / f"{name}-{digest}-{sys.version_info.major}.{sys.version_info.minor}"
    done = place / "installed"
    if not done.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        install(place)
        done.touch()
    return place


def _run(command: list[str], folder: Path) -> None:
    """Skips the test where the command fails: without a registry of packages there are no clients."""
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if ran.returncode:
        words = (ran.stderr.strip().splitlines() or ["no words"])[-1]
        pytest.skip(f"{' '.join(command[:4])} failed: {words}")
