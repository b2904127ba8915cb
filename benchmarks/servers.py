"""Servers of ours and of other engines, with a draft model or without, and a client that watches a stream."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes.util import find_library
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from foretoken.bench.http_load import server_process, serving
from foretoken.bench.output import cores
from foretoken.bench.peers.export import gguf
from foretoken.bench.peers.registry import PEERS
from foretoken.core.http import listed_models

CONTEXT = "4096"
SEQUENCES = "64"
PLAIN = ("--speculative-config", '{"method": "none"}')
_SIZES = ("--max-model-len", CONTEXT, "--max-num-seqs", SEQUENCES)


def need_vllm() -> None:
    """Raises SystemExit if vLLM is not set up."""
    if PEERS["vllm"].missing:
        raise SystemExit("vLLM is not set up; `make peers PEERS=vllm` does it")


def vllm_serving(model: str, draft: str, depth: int, *more: str) -> AbstractContextManager[tuple[str, int]]:
    """Runs vLLM's server within the ``with`` block. Yields its address and its process id.

    depth: The draft length, 0 is plain decoding. more: Further arguments of the server.
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


def llamacpp_serving(model: str, draft: str, depth: int) -> AbstractContextManager[tuple[str, int]]:
    """Runs llama.cpp's server, as ``vllm_serving`` runs vLLM's, for 16 sequences at once."""
    peer = PEERS["llamacpp"]
    command = [str(peer.place / peer.program), "--model", str(gguf(Path(model), "BF16"))]
    command += ["--parallel", "16", "--ctx-size", "16384", "--threads", str(cores()), "--metrics"]
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


@dataclass
class Answer:
    """Result of one request. arrivals: seconds at which text arrived."""

    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    error: str | None = None

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Returns, for each chunk but the first, its arrival and the seconds since the previous one."""
        return [(b, b - a) for a, b in pairwise(self.arrivals)]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer | None = None) -> Answer:
    """Streams one completion. answer: filled while chunks arrive."""
    answer = answer or Answer()
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        if response.status_code != 200:
            answer.error = f"{response.status_code}: {(await response.aread()).decode()[:200]}"
            return answer
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = event["error"]["message"]
            for choice in event.get("choices", ()):
                answer.text += choice["text"]
                if choice["text"]:
                    answer.arrivals.append(time.perf_counter())
    return answer


def talking(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=600.0, limits=httpx.Limits(max_connections=None))
