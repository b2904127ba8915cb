"""``make peers``: each peer in its own virtual environment, with the versions listed beside this script.

The lists are complete (every package, dependencies included), so nothing is resolved: the peers' own pins contradict
each other where it does not matter, and vLLM's CPU build requires packages that are built for CUDA. llama.cpp is built
from the source that the sdist of llama-cpp-python contains, which takes a C++ compiler and some minutes. With
FORETOKEN_CPU set it is built for the instructions of that level, in a folder of its own; a race with the same
FORETOKEN_CPU takes that one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from foretoken.bench.peers.llamacpp import BUILD
from foretoken.bench.peers.registry import PEERS, Peer
from foretoken.core.native import cpu

TORCH = "torch==2.13.0"
IMPORTS = {"openvino": "import openvino_genai, optimum.intel", "vllm": "from vllm import LLM"}
LLAMA_CPP = "llama-cpp-python==0.3.36"
VENDORED = "/vendor/llama.cpp/"
NAMES = (*IMPORTS, "llamacpp")
# Nothing is downloaded during the build, and the server has no web page.
OPTIONS = (
    *("CMAKE_BUILD_TYPE=Release", "GGML_CCACHE=OFF", "LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF"),
    *("LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_APP=OFF"),
)
# llama.cpp's options for instructions, by the feature that they need.
INSTRUCTIONS = {
    "AVX": "avx2",
    "AVX2": "avx2",
    "BMI2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_TILE": "amx_tile",
    "AMX_INT8": "amx_int8",
    "AMX_BF16": "amx_bf16",
}
TOOLS = ("llama-server", "llama-quantize", "llama-bench", "llama-perplexity")


def set_up(peer: Peer, pip_args: list[str]) -> bool:
    """Creates or updates one environment. Returns whether the peer can be used."""
    python, listed = peer.python, Path(__file__).with_name(f"{peer.name}.txt")
    print(f"== {peer.name}: {peer.place}", flush=True)
    if not python.exists():
        venv.create(peer.place, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
    install = [*pip, "install", "--no-compile", *pip_args]
    if peer.name in IMPORTS:
        # torch comes first and with its dependencies, which differ between its builds for CPU and for CUDA.
        commands = iter([[*install, TORCH], [*install, "--no-deps", "-r", str(listed)]])
        check = [str(python), "-c", IMPORTS[peer.name]]
    else:
        commands = build_llamacpp(peer, [*install, "--no-deps", "-r", str(listed)], [*pip, "download", *pip_args])
        check = [str(peer.place / peer.program), "--version"]
    for command in chain(commands, [check]):
        if subprocess.run(command, check=False).returncode:
            print(f"peers: {peer.name} is not usable; failed: {' '.join(command)}", file=sys.stderr)
            return False
    return True


def build_llamacpp(peer: Peer, install: list[str], download: list[str]) -> Iterator[list[str]]:
    """Yields the commands that build llama.cpp; each has succeeded before the next is asked for."""
    source, build, programs = peer.place / "source", peer.place / BUILD, peer.python.parent
    yield install
    with tempfile.TemporaryDirectory(dir=peer.place) as temporary:
        sdist = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", temporary, LLAMA_CPP]
        yield [*download, *sdist]
        unpack(next(Path(temporary).glob("*.tar.gz")), source)
    options = [f"-D{option}" for option in (*OPTIONS, *instructions(), f"CMAKE_MAKE_PROGRAM={programs / 'ninja'}")]
    yield [str(programs / "cmake"), "-S", str(source), "-B", str(build), "-G", "Ninja", *options]
    yield [str(programs / "cmake"), "--build", str(build), "--target", *TOOLS]


def instructions() -> list[str]:
    """Returns options for this processor's instructions, or for those of the level that FORETOKEN_CPU names."""
    level = cpu.chosen()
    if level is None or not os.environ.get(cpu.VARIABLE):
        return ["GGML_NATIVE=ON"]
    chosen = (f"GGML_{name}={'ON' if need in level.features else 'OFF'}" for name, need in INSTRUCTIONS.items())
    return ["GGML_NATIVE=OFF", *chosen]


def unpack(sdist: Path, out: Path) -> None:
    """Writes llama.cpp's files of an sdist to the folder ``out``, which is replaced."""
    shutil.rmtree(out, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        members = []
        for member in archive.getmembers():
            _, found, path = member.name.partition(VENDORED)
            if found and path != ".git":  # it points to a repository that the sdist lacks
                members.append(member.replace(name=path))
        archive.extractall(out, members, filter="data")


def main(args: list[str]) -> int:
    """Sets up the peers that ``args`` name, all of them by default. args: names of peers, and options for pip."""
    names = [arg for arg in args if arg in NAMES] or list(NAMES)
    done = [set_up(PEERS[name], [arg for arg in args if arg not in NAMES]) for name in names]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
