"""``foretoken bench serve``: throughput and latencies of a server under load."""

from __future__ import annotations

import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from foretoken import zoo
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import MODEL, ReportOptions, counts, names
from foretoken.cli.theme import wide_console
from foretoken.core.errors import ForetokenError, InvalidRequest

if TYPE_CHECKING:
    from foretoken.bench.http_load import LoadedServer
    from foretoken.bench.http_workloads import LoadPlan


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Requests to send, and their number."""

    workloads: str = option("short,long,shared,agents", "Comma-separated: short, long, shared, agents.")
    concurrency: str = option("1,4,16,64", "Requests at once, comma-separated.")
    requests: int = option(2, "Requests of each concurrent client.", min=1)
    max_tokens: int = option(64, "Tokens of each answer.", min=1)
    long_tokens: int = option(1500, "Tokens of a long prompt, about.", min=1)
    shared_tokens: int = option(2000, "Tokens of a shared beginning, about.", min=1)
    agents: int = option(8, "Agents on one beginning.", min=1)
    temperature: float = option(0.0, "Of every request.", min=0)
    generator: str = option(
        "foretoken", "What makes the load: foretoken, or vllm for `vllm bench serve` where it is installed."
    )
    tokenizer: str | None = option(None, "Tokenizer with which vllm counts tokens. [the bundled target's]")

    def plan(self) -> LoadPlan:
        """Returns the numbers of requests and tokens. Raises InvalidRequest."""
        from foretoken.bench.http_workloads import LoadPlan

        at_once = counts("--concurrency", self.concurrency)
        return LoadPlan(at_once, self.requests, self.long_tokens, self.shared_tokens, self.agents)

    def check(self) -> None:
        """Raises InvalidRequest for an unknown generator."""
        from foretoken.bench.public_load import GENERATORS

        names("--generator", self.generator, GENERATORS)

    def server(self, address: str, api_key: str | None, model: str | None) -> LoadedServer:
        """Returns the server under load. Raises ForetokenError if it does not answer."""
        from foretoken.bench.http_load import LoadedServer
        from foretoken.bench.public_load import VllmLoadedServer

        options = {"max_tokens": self.max_tokens, "temperature": self.temperature, "ignore_eos": True}
        if self.generator == "vllm":
            return VllmLoadedServer(address, api_key, model, options, self.tokenizer or str(zoo.path("target")))
        return LoadedServer(address, api_key, model, options)


@grouped
def bench_serve(
    url: str | None = option(None, "Address of a running OpenAI-compatible server. [one of our own is started]"),
    server_options: str = option("", 'Options of the server to start, such as "TARGET".', metavar="OPTIONS"),
    model: str | None = option(None, "Model to ask for. [the first that is listed]", *MODEL),
    api_key: str | None = option(None, "API key of the server.", envvar="FORETOKEN_API_KEY"),
    *,
    load: LoadOptions,
    report: ReportOptions,
) -> None:
    """Load a server with concurrent requests: throughput, TTFT and ITL percentiles, and the gain of shared prefixes."""
    from foretoken.bench.http_page import load_page, load_table, speedup_lines
    from foretoken.bench.http_workloads import WORKLOADS, run_workload
    from foretoken.bench.setting import setting

    if url is not None and server_options:
        raise InvalidRequest("--server-options are for a server that is started; omit --url or them")
    load.check()
    chosen, plan = names("workload", load.workloads, WORKLOADS), load.plan()
    notes, results = wide_console(report.color, stderr=True), []
    with nullcontext((url, 0)) if url is not None else started(server_options, api_key) as (address, _):
        server = load.server(address, api_key, model)
        server.run("warm-up", ["import os\n"] * 2, 1)
        for name in chosen:
            for result in run_workload(name, server, plan):
                results.append(result)
                notes.print(
                    f"{result.workload}, {result.concurrency} at once: {result.output_tokens_per_second:.1f} tokens/s",
                    style="dim",
                    markup=False,
                )
    sent = {"model": server.model, "max_tokens": load.max_tokens, "generator": load.generator}
    facts = setting() | {"server": url or "foretoken serve"} | sent

    record = {"setting": facts, "results": [asdict(result) for result in results]}
    parts = [load_table(results), *speedup_lines(results)]
    report.publish(record, lambda: parts, lambda: load_page(facts, results), facts)
    if failed := [result for result in results if result.failed]:
        count = sum(result.failed for result in failed)
        raise ForetokenError(f"{count} requests failed; the first: {failed[0].error}")


def started(options: str, key: str | None) -> AbstractContextManager[tuple[str, int]]:
    """Runs a server of our own within the ``with`` block. Yields its address and process id. Raises ForetokenError."""
    from foretoken.bench.server_process import server_process

    command = [sys.executable, "-m", "foretoken", "serve", "--max-num-seqs", "64", "--log-level", "error"]
    return server_process([*command, *shlex.split(options)], "/ready", {"FORETOKEN_API_KEY": key} if key else None)
