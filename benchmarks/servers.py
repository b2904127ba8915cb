"""Servers of ours and of other engines, with a draft model or without."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes.util import find_library
from pathlib import Path

from foretoken.bench.peers.export import gguf
from foretoken.bench.peers.registry import PEERS
from foretoken.bench.server_process import server_process
from foretoken.bench.setting import cores
from foretoken.core.http import listed_models

CONTEXT = "4096"
SEQUENCES = "64"
PLAIN = ("--speculative-config", '{"method": "none"}')
_SIZES = ("--max-model-len", CONTEXT, "--max-num-seqs", SEQUENCES)


def serving(*arguments: str) -> AbstractContextManager[tuple[str, int]]:
    """Runs our server within the ``with`` block. Yields its address and its process id."""
    command = [sys.executable, "-m", "foretoken", "serve", "--log-level", "error", *arguments]
    return server_process(command, "/ready")


def vllm_serving(model: str, draft: str, depth: int, *more: str) -> AbstractContextManager[tuple[str, int]]:
    """Runs vLLM's server within the ``with`` block. Yields its address and its process id.

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
    words = ["--model", model, "--dtype", "bfloat16", *_SIZES]
    if depth:
        speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": depth}
        words += ["--speculative-config", json.dumps(speculation)]
    command = [str(peer.python), "-m", "vllm.entrypoints.openai.api_server", *words, *more]
    return server_process(command, "/health", environment)


def llamacpp_serving(model: str, draft: str, depth: int, slots: int = 16) -> AbstractContextManager[tuple[str, int]]:
    """Runs llama.cpp's server, as ``vllm_serving`` runs vLLM's. slots: sequences at once."""
    peer = PEERS["llamacpp"]
    command = [str(peer.place / peer.program), "--model", str(gguf(Path(model), "BF16"))]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * 1024), "--threads", str(cores()), "--metrics"]
    if depth:
        command += ["--spec-type", "draft-simple", "--spec-draft-model", str(gguf(Path(draft), "BF16"))]
        command += ["--spec-draft-n-max", str(depth), "--spec-draft-p-min", "0", "--spec-draft-threads", str(cores())]
    return server_process(command, "/health")


@contextmanager
def engine_serving(engine: str, model: str, draft: str, depth: int | None) -> Iterator[str]:
    """Runs the server of "foretoken", "vllm" or "llamacpp". Yields its address.

    vLLM's does not compile, which takes minutes at every draft length. depth: 0 is plain decoding; None leaves the
    draft length to our server.
    """
    if engine == "foretoken":
        config = {"method": "draft_model", "model": draft, "num_speculative_tokens": depth}
        chosen = ("--draft-model", draft) if depth is None else ("--speculative-config", json.dumps(config))
        server = serving("--model", model, *_SIZES, *(PLAIN if depth == 0 else chosen))
    elif engine == "vllm":
        server = vllm_serving(model, draft, depth or 0, "--enforce-eager")
    else:
        server = llamacpp_serving(model, draft, depth or 0)
    with server as (address, _):
        yield address


def listed_model(url: str) -> str:
    """Returns the name of the first model that a server lists."""
    return str(listed_models(url, None)[0]["id"])
