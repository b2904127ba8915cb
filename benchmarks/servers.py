"""Servers of other engines, with a draft model or without, for the benchmarks that compare with them or plan them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes.util import find_library
from pathlib import Path

import httpx

from foretoken.bench.peers.export import gguf
from foretoken.bench.peers.registry import PEERS
from foretoken.bench.setting import cores
from foretoken.core.http import listed_models

CONTEXT = "4096"
SEQUENCES = "64"
PATIENCE = 600.0  # seconds for a server to compile and start


@contextmanager
def vllm_serving(model: str, draft: str, depth: int, *more: str) -> Iterator[str]:
    """Runs vLLM's server on a free port within the ``with`` block. Yields its address.

    Args:
        model: The target's checkpoint.
        draft: The draft model's.
        depth: The draft length, 0 is plain decoding.
        more: Further arguments of the server.
    """
    peer = PEERS["vllm"]
    threads = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    libraries = [find_library("tcmalloc_minimal") or "", str(peer.place / "lib" / "libiomp5.so")]
    preload = ":".join(name for name in libraries if name and (os.sep not in name or Path(name).exists()))
    environment = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": threads, "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "LD_PRELOAD": preload}
    words = ["--model", model, "--dtype", "bfloat16", "--max-model-len", CONTEXT, "--max-num-seqs", SEQUENCES]
    if depth:
        speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": depth}
        words += ["--speculative-config", json.dumps(speculation)]
    command = [str(peer.python), "-m", "vllm.entrypoints.openai.api_server", *words, *more]
    with _running("vLLM", command, environment) as address:
        yield address


@contextmanager
def llamacpp_serving(model: str, draft: str, depth: int, slots: int = 16) -> Iterator[str]:
    """Runs llama.cpp's server, as ``vllm_serving`` runs vLLM's. slots: sequences at once."""
    command = [
        str(PEERS["llamacpp"].place / PEERS["llamacpp"].program),
        "--model",
        str(gguf(Path(model), "BF16")),
    ]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * 1024), "--threads", str(cores()), "--metrics"]
    if depth:
        command += ["--spec-type", "draft-simple", "--spec-draft-model", str(gguf(Path(draft), "BF16"))]
        command += ["--spec-draft-n-max", str(depth), "--spec-draft-p-min", "0", "--spec-draft-threads", str(cores())]
    with _running("llama.cpp", command, {}) as address:
        yield address


@contextmanager
def eager_serving(engine: str, model: str, draft: str, depth: int) -> Iterator[str]:
    """Runs the server of "vllm" or "llamacpp". vLLM's does not compile, which takes minutes at every draft length."""
    eager = vllm_serving(model, draft, depth, "--enforce-eager")
    with eager if engine == "vllm" else llamacpp_serving(model, draft, depth) as address:
        yield address


def listed_model(url: str) -> str:
    """Returns the name of the first model that a server lists."""
    return str(listed_models(url, None)[0]["id"])


@contextmanager
def _running(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*command, "--host", "127.0.0.1", "--port", str(port)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, stdout=quiet, stderr=quiet, env=os.environ | environment) as process:
        try:
            address, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
            while not answers(address):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{name}'s server did not start: {' '.join(words)}")
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            process.wait(60)


def answers(address: str) -> bool:
    """Returns whether a server is ready."""
    with suppress(httpx.HTTPError):
        return httpx.get(f"{address}/health", timeout=5.0).status_code == 200
    return False
