"""Our server beside vLLM's: the same model, requests and machine, one after the other for each workload.

    python benchmarks/serving_vllm.py --workload short --workload agents --temperature 0 --output serving_vllm.json
    python benchmarks/serving_vllm.py --workload short --concurrency 1 --vllm-depth 4

Both servers run all the while, and wait while the other one is loaded. The load is that of ``foretoken bench serve``.
It needs ``make peers PEERS=vllm``. vLLM gets both cores and, where they are there, the libraries that it recommends
(Intel's OpenMP of its environment, tcmalloc of the system). Without ``--vllm-depth`` it decodes plainly.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes.util import find_library
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import httpx
import typer

from clients import serving
from foretoken import zoo
from foretoken.bench.http_load import LoadedServer, LoadResult
from foretoken.bench.http_page import load_table, speedup_lines
from foretoken.bench.http_workloads import AGENTS, LONG, SHARED, SHORT, LoadPlan, run_workload
from foretoken.bench.peers.registry import PEERS
from foretoken.bench.setting import setting, wide_console
from foretoken.train.widen.checkpoint import scaled

CONTEXT = "4096"
SEQUENCES = "64"
PATIENCE = 600.0  # seconds for vLLM to compile and start
console = wide_console()


@contextmanager
def vllm_serving(model: str, draft: str, depth: int) -> Iterator[str]:
    """Runs vLLM's server on a free port within the ``with`` block. Yields its address."""
    peer = PEERS["vllm"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    libraries = [find_library("tcmalloc_minimal") or "", str(peer.place / "lib" / "libiomp5.so")]
    preload = ":".join(name for name in libraries if name and (os.sep not in name or Path(name).exists()))
    environment = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "LD_PRELOAD": preload}
    words = ["--model", model, "--dtype", "bfloat16", "--max-model-len", CONTEXT, "--max-num-seqs", SEQUENCES]
    if depth:
        speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": depth}
        words += ["--speculative-config", json.dumps(speculation)]
    command = [str(peer.python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", *words]
    command += ["--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | environment) as process:
        try:
            address, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
            while not answers(address):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit("vLLM's server did not start")
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


def compared(theirs: Sequence[LoadResult], ours: Sequence[LoadResult]) -> Iterator[str]:
    """Yields, for each workload and concurrency, our figures over vLLM's, in words."""
    for one, other in zip(ours, theirs, strict=True):
        if one.itl and other.itl and one.ttft and other.ttft and other.output_tokens_per_second:
            rate = one.output_tokens_per_second / other.output_tokens_per_second
            yield (
                f"{one.workload}, {one.concurrency} at once: {rate:.2f}x the tokens per second, "
                f"{one.itl.p99 / other.itl.p99:.2f}x the p99 ITL, {one.ttft.p50 / other.ttft.p50:.2f}x the median TTFT"
            )


def main(
    workload: Annotated[list[str], typer.Option(help="short, long, shared, agents.")] = [SHORT, LONG, SHARED, AGENTS],
    concurrency: Annotated[list[int], typer.Option(help="Requests at once; may be repeated.")] = [1, 4, 16, 64],
    temperature: Annotated[list[float], typer.Option(help="May be repeated.")] = [0.0, 1.0],
    requests: Annotated[int, typer.Option(help="Requests of each concurrent client.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="Of every answer.")] = 64,
    long_tokens: Annotated[int, typer.Option(help="Of a long prompt, about.")] = 1500,
    vllm_depth: Annotated[int, typer.Option(help="Draft tokens of vLLM; 0 is plain decoding.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--output", help="Write what was measured there.")] = None,
) -> None:
    """Prints throughput and latencies of both servers, and ours over vLLM's."""
    if PEERS["vllm"].missing:
        raise SystemExit("vLLM is not set up; `make peers PEERS=vllm` does it")
    model, draft = str(scaled()), str(zoo.path("draft"))
    plan, record = LoadPlan(tuple(concurrency), requests, long_tokens), list[dict[str, object]]()
    own = ("--model", model, "--draft-model", draft, "--max-model-len", CONTEXT, "--max-num-seqs", SEQUENCES)
    with vllm_serving(model, draft, vllm_depth) as theirs, serving(*own) as (ours, _):
        for degree in temperature:
            options = {"max_tokens": max_tokens, "temperature": degree, "ignore_eos": True}
            servers = {name: LoadedServer(url, None, None, options) for name, url in (("vllm", theirs), ("ours", ours))}
            for server in servers.values():
                server.run("warm-up", ["import os\n"] * 8, 4)
            for kind in workload:
                results = {name: list(run_workload(kind, server, plan)) for name, server in servers.items()}
                for name, each in results.items():
                    console.print(f"{name}, temperature {degree:g}", load_table(each), *speedup_lines(each), sep="\n")
                    record += [{"server": name, "temperature": degree, **asdict(result)} for result in each]
                console.print("\n".join(compared(results["vllm"], results["ours"])))
    if json_file is not None:
        text = json.dumps({"results": record, "setting": setting()}, indent=1, default=str)
        json_file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
