"""Runs the steps of a Containerfile as plain commands, on a machine without a container engine.

    .venv/bin/python examples/recipes/container_steps.py FOLDER

FOLDER is the root: copied files go there, absolute paths are resolved there, and a virtual environment replaces the
image's Python. Steps that need root privileges (apt-get, useradd) are skipped and named. Finally the container's
command runs on loopback until the health check passes and a completion has arrived.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE = 300.0  # seconds until the server answers
_PRIVILEGED = ("apt-get", "useradd")


@dataclass(frozen=True)
class Step:
    """One instruction, such as RUN or COPY, and its argument."""

    name: str
    value: str

    @property
    def words(self) -> list[str]:
        """Returns the argument as a list: its JSON form, or split as a shell does."""
        array = re.search(r"\[.*\]$", self.value)
        return list(json.loads(array[0])) if array else shlex.split(self.value)


def steps(text: str) -> list[Step]:
    """Returns the instructions of a Containerfile in order, without comments and line breaks."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = (line.strip().partition(" ") for line in joined.splitlines() if line.strip())
    return [Step(name, value.strip()) for name, _, value in pairs]


@dataclass
class Plain:
    """Runs steps below ``root``."""

    root: Path
    environment: dict[str, str]
    folder: Path

    @classmethod
    def start(cls, root: Path) -> Plain:
        """Creates a virtual environment with this Python."""
        subprocess.run([sys.executable, "-m", "venv", str(root / "python")], check=True)
        path = f"{root / 'python' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return cls(root, os.environ | {"PATH": path}, root)

    def take(self, step: Step) -> None:
        """Runs a step, or prints why it is skipped."""
        if step.name in ("ARG", "ENV"):
            for pair in step.words:
                name, _, value = pair.partition("=")
                if step.name == "ENV" or name not in os.environ:
                    self.environment[name] = str(self.inside(value)) if value.startswith("/") else value
        elif step.name == "WORKDIR":
            self.folder = self.inside(step.value)
            self.folder.mkdir(parents=True, exist_ok=True)
        elif step.name == "COPY":
            *sources, destination = step.words
            for source in sources:
                self._copy(ROOT / source, self.folder / destination)
        elif step.name == "RUN" and not any(word in step.value for word in _PRIVILEGED):
            print(f"$ {step.value}", flush=True)
            subprocess.run(["sh", "-ec", step.value], env=self.environment, cwd=self.folder, check=True)
        elif step.name == "RUN":
            print(f"- left out: {step.value}", flush=True)

    def inside(self, path: str) -> Path:
        """Returns the local path of an absolute path in the container."""
        return self.root / path.lstrip("/")

    def _copy(self, source: Path, destination: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, destination, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copy(source, destination)


def serve(plain: Plain, command: list[str], check: list[str]) -> str:
    """Runs the last command on a free loopback port. Returns a completion once the health check has passed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    swapped = {"0.0.0.0": "127.0.0.1", "8000": port}
    command = [swapped.get(word, word) for word in command]
    print("$ " + shlex.join(command), flush=True)
    process = subprocess.Popen(command, env=plain.environment, cwd=plain.root)
    try:
        end = time.monotonic() + PATIENCE
        healthy = [word.replace(":8000/", f":{port}/") for word in check]
        quiet = {"env": plain.environment, "stderr": subprocess.DEVNULL, "check": False}
        while subprocess.run(healthy, **quiet).returncode:  # type: ignore[call-overload]
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit("the server did not become healthy")
            time.sleep(2.0)
        return _completion(f"http://127.0.0.1:{port}/v1/completions")
    finally:
        process.terminate()
        process.wait(60)


def _completion(url: str) -> str:
    body = {"model": "foretoken", "prompt": "def read_lines(path):", "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def last(all_steps: list[Step], name: str) -> Step:
    """Returns the last instruction of that name, the one in force."""
    return next(step for step in reversed(all_steps) if step.name == name)


def main(folder: Annotated[Path, typer.Argument(help="An empty folder, or one to be made.")]) -> None:
    """Runs all steps."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty")
    container = steps((HERE / "Containerfile").read_text(encoding="utf-8"))
    plain = Plain.start(folder.resolve())
    for step in container:
        plain.take(step)
    print(serve(plain, last(container, "CMD").words, last(container, "HEALTHCHECK").words))


if __name__ == "__main__":
    typer.run(main)
