"""``make peers``: each peer in its own virtual environment, with the versions listed beside this script.

The lists are complete (every package, dependencies included), so nothing is resolved: the peers' own pins contradict
each other where it does not matter, and vLLM's CPU build requires packages that are built for CUDA.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from foretoken.bench.peers.registry import PEERS

TORCH = "torch==2.13.0"
IMPORTS = {"openvino": "import openvino_genai, optimum.intel", "vllm": "from vllm import LLM"}


def set_up(name: str, pip_args: list[str]) -> bool:
    """Creates or updates one environment. Returns whether its engine can be imported."""
    python = PEERS[name].python
    print(f"== {name}: {python.parents[1]}", flush=True)
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "-q", *pip_args]
    listed = Path(__file__).with_name(f"{name}.txt")
    # torch comes first and with its dependencies, which differ between its builds for CPU and for CUDA.
    for command in ([*pip, TORCH], [*pip, "--no-deps", "-r", str(listed)], [str(python), "-c", IMPORTS[name]]):
        if subprocess.run(command, check=False).returncode:
            print(f"peers: {name} is not usable; failed: {' '.join(command)}", file=sys.stderr)
            return False
    return True


def main(args: list[str]) -> int:
    """Sets up the peers that ``args`` name, all of them by default. args: names of peers, and options for pip."""
    names = [arg for arg in args if arg in IMPORTS] or list(IMPORTS)
    done = [set_up(name, [arg for arg in args if arg not in IMPORTS]) for name in names]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
