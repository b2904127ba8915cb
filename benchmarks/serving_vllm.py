"""Our server beside vLLM's: the same model, requests and machine, one after the other for each workload.

    python benchmarks/serving_vllm.py --workload short --workload agents --temperature 0 --output serving_vllm.json
    python benchmarks/serving_vllm.py --workload short --concurrency 1 --vllm-depth 4

Both servers run all the while, and wait while the other one is loaded. The load is that of ``foretoken bench serve``.
It needs ``make peers PEERS=vllm``. vLLM gets both cores and, where they are there, the libraries that it recommends
(Intel's OpenMP of its environment, tcmalloc of the system). Without ``--vllm-depth`` it decodes plainly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clients import serving
from foretoken import zoo
from foretoken.bench.http_load import LoadedServer, LoadResult
from foretoken.bench.http_page import load_table, speedup_lines
from foretoken.bench.http_workloads import AGENTS, LONG, SHARED, SHORT, LoadPlan, run_workload
from foretoken.bench.peers.registry import PEERS
from foretoken.bench.setting import setting, wide_console
from foretoken.train.widen.checkpoint import scaled
from servers import CONTEXT, SEQUENCES, vllm_serving

console = wide_console()


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
