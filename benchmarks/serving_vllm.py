"""Our server beside vLLM's, or beside itself without speculation: the same model and requests, in turns.

    python benchmarks/serving_vllm.py --workload short --temperature 0 --output serving_vllm.json
    python benchmarks/serving_vllm.py --workload agents --turns 1 --max-tokens 8 --temperature 0
    python benchmarks/serving_vllm.py --workload short --concurrency 1 --vllm-depth 4
    python benchmarks/serving_vllm.py --against plain --workload short --requests 4 --max-tokens 96

Both servers run all the while, and wait while the other one is loaded. The load is that of ``foretoken bench serve``,
with other prompts in each turn, and answers of several lengths, so that some requests begin while others decode.
Ratios are medians of the turns, since a machine's speed changes between minutes.
vLLM needs ``make peers PEERS=vllm``; it gets both cores and, where they are there, the libraries that it recommends
(Intel's OpenMP of its environment, tcmalloc of the system). Without ``--vllm-depth`` it decodes plainly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from statistics import median
from typing import Annotated

import typer

from foretoken import zoo
from foretoken.bench.http_load import (
    AGENTS,
    LONG,
    SHARED,
    SHORT,
    LoadedServer,
    LoadPlan,
    LoadResult,
    run_workload,
    serving,
)
from foretoken.bench.output import report, wide_console
from foretoken.bench.page import load_table, speedup_lines
from options import Output, Small, target_path
from servers import CONTEXT, PLAIN, SEQUENCES, need_vllm, vllm_serving

console = wide_console()


def compared(theirs: Sequence[LoadResult], ours: Sequence[LoadResult]) -> Iterator[str]:
    """Yields, for each workload and concurrency, our figures over the other's as medians of the turns, in words."""

    def place(pair: tuple[LoadResult, LoadResult]) -> tuple[str, int]:
        return pair[0].workload, pair[0].concurrency

    for (workload, concurrency), turns in groupby(sorted(zip(ours, theirs, strict=True), key=place), key=place):
        ratios = [ratio for pair in turns if (ratio := _ratios(*pair))]
        if ratios:
            rate, itl, ttft = (median(each) for each in zip(*ratios, strict=True))
            yield (
                f"{workload}, {concurrency} at once, {len(ratios)} turns: {rate:.2f}x the tokens per second, "
                f"{itl:.2f}x the p99 ITL, {ttft:.2f}x the median TTFT"
            )


def _ratios(ours: LoadResult, theirs: LoadResult) -> tuple[float, float, float] | None:
    """Returns our tokens per second, p99 ITL and median TTFT over theirs; None if either has none."""
    if not (ours.itl and theirs.itl and ours.ttft and theirs.ttft and theirs.output_tokens_per_second):
        return None
    rate = ours.output_tokens_per_second / theirs.output_tokens_per_second
    return rate, ours.itl.p99 / theirs.itl.p99, ours.ttft.p50 / theirs.ttft.p50


def main(
    workload: Annotated[list[str], typer.Option(help="short, long, shared, agents.")] = [SHORT, LONG, SHARED, AGENTS],
    concurrency: Annotated[list[int], typer.Option(help="Requests at once; may be repeated.")] = [1, 4, 16, 64],
    temperature: Annotated[list[float], typer.Option(help="May be repeated.")] = [0.0, 1.0],
    requests: Annotated[int, typer.Option(help="Requests of each concurrent client in a turn.")] = 2,
    turns: Annotated[int, typer.Option(help="Turns of each server at each concurrency.")] = 3,
    max_tokens: Annotated[list[int], typer.Option(help="Of the answers, one after another.")] = [32, 80, 48, 96, 64],
    long_tokens: Annotated[int, typer.Option(help="Of a long prompt, about.")] = 1500,
    against: Annotated[str, typer.Option(help="vllm, or plain: ours without speculation.")] = "vllm",
    small: Small = False,
    vllm_depth: Annotated[int, typer.Option(help="Draft tokens of vLLM; 0 is plain decoding.")] = 0,
    output: Output = None,
) -> None:
    """Prints throughput and latencies of both servers, and ours over the other's."""
    if against == "vllm":
        need_vllm()
    model, draft = str(target_path(None, small)), str(zoo.path("draft"))
    plan, record = LoadPlan(tuple(concurrency), requests, long_tokens), list[dict[str, object]]()
    both = ("--model", model, "--max-model-len", CONTEXT, "--max-num-seqs", SEQUENCES)
    other = vllm_serving(model, draft, vllm_depth) if against == "vllm" else serving(*both, *PLAIN)
    with other as (theirs, _), serving(*both, "--draft-model", draft) as (ours, _):
        for degree in temperature:
            options = {"temperature": degree, "ignore_eos": True}
            addresses = {against: theirs, "ours": ours}
            servers = {name: LoadedServer(url, None, None, options, max_tokens) for name, url in addresses.items()}
            for server in servers.values():
                server.run("warm-up", ["import os\n"] * 8, 4)
            for kind in workload:
                loads = [run_workload(kind, server, plan) for _ in range(turns) for server in servers.values()]
                every = [result for at_once in zip(*loads, strict=True) for result in at_once]
                results = {name: every[number :: len(servers)] for number, name in enumerate(servers)}
                for name, each in results.items():
                    console.print(f"{name}, temperature {degree:g}", load_table(each), *speedup_lines(each), sep="\n")
                    record += [{"server": name, "temperature": degree, **asdict(result)} for result in each]
                console.print("\n".join(compared(results[against], results["ours"])))
    report([], {"against": against, "vllm_depth": vllm_depth}, output, results=record)


if __name__ == "__main__":
    typer.run(main)
