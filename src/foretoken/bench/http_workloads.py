"""Prompts that load a server: short, long, with a shared beginning, and agents on one beginning."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from foretoken.bench.http_load import LoadedServer, LoadResult
from foretoken.bench.workloads import FUNCTIONS

SHORT, LONG, SHARED, AGENTS = WORKLOADS = ("short", "long", "shared", "agents")
_CHARACTERS = 3.2  # of a token of Python, about; the server's own count is reported
_COLD = 2  # beginnings that are sent one by one, each of which takes the whole prefill


@dataclass(frozen=True)
class LoadPlan:
    """Numbers of requests and tokens to send.

    Attributes:
        concurrencies: Requests at once, one run for each.
        per_client: Requests of each concurrent client.
        long_tokens: Tokens of a long prompt, about.
        shared_tokens: Tokens of a shared beginning, about.
        agents: Number of agents.
    """

    concurrencies: tuple[int, ...] = (1, 4, 16, 64)
    per_client: int = 2
    long_tokens: int = 1500
    shared_tokens: int = 2000
    agents: int = 8


def run_workload(name: str, server: LoadedServer, plan: LoadPlan) -> Iterator[LoadResult]:
    """Yields the results of a workload. No prompt repeats an earlier one, so only what it shares is cached.

    short: functions of ours. long: other text before each. shared: one beginning before each, the first time cold.
    agents: first each with a beginning of its own (agents, cold), then all on one that was sent once (agents, warm);
    one by one and all at once. One by one, two are cold.
    """
    if name == AGENTS:
        yield from _agents(server, plan)
        return
    for concurrency in plan.concurrencies:
        count = max(4, concurrency * plan.per_client)
        beginning = "" if name == SHORT else filler(plan.shared_tokens if name == SHARED else plan.long_tokens)
        prompts = [
            f"{beginning if name == SHARED else own(beginning)}{own(FUNCTIONS[i % len(FUNCTIONS)])}"
            for i in range(count)
        ]
        yield server.run(name, prompts, concurrency)


def _agents(server: LoadedServer, plan: LoadPlan) -> Iterator[LoadResult]:
    beginning = filler(plan.shared_tokens)
    for concurrency in (1, plan.agents):
        cold = [own(beginning) + task(i) for i in range(max(_COLD, concurrency))]
        yield server.run(f"{AGENTS}, cold", cold, concurrency)
        shared = own(beginning)
        server.run(AGENTS, [shared], 1)
        yield server.run(f"{AGENTS}, warm", [shared + task(i) for i in range(plan.agents)], concurrency)


def filler(tokens: int) -> str:
    """Returns text of about ``tokens`` tokens."""
    text = "\n\n\n".join(f"{function}\n        pass" for function in FUNCTIONS)
    size = int(tokens * _CHARACTERS)
    return (f"{text}\n\n\n" * (size // len(text) + 1))[:size]


def own(text: str) -> str:
    """Returns a text with a first line that no other prompt has."""
    return f"# {secrets.token_hex(8)}\n{text}" if text else text


def task(number: int) -> str:
    """Returns the text that an agent adds to the common beginning."""
    return f"\n\n\n# agent {number}\n{FUNCTIONS[number % len(FUNCTIONS)]}"


def prefix_speedups(results: list[LoadResult]) -> dict[int, float]:
    """Returns by concurrency how many times shorter the median TTFT of warm agents is than that of cold ones."""
    ttfts: dict[tuple[str, int], list[float]] = defaultdict(list)
    for result in results:
        if result.ttft is not None:
            ttfts[result.workload, result.concurrency].append(result.ttft.p50)
    return {
        concurrency: median(cold) / median(warm)
        for (name, concurrency), cold in list(ttfts.items())
        if name == f"{AGENTS}, cold" and (warm := ttfts.get((f"{AGENTS}, warm", concurrency)))
    }
