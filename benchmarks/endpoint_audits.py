"""Audits of servers and engines of others, each with a draft model beside the same without it.

    python benchmarks/endpoint_audits.py --engine foretoken --engine llamacpp --output audits.json
    python benchmarks/endpoint_audits.py --engine vllm --engine "vllm in process" --engine openvino

The target and the draft are the bundled ones, which the server or the engine computes in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.table import Table

from foretoken import zoo
from foretoken.audit.endpoint import Endpoint, audit_endpoint
from foretoken.audit.endpoint.engines import started
from foretoken.audit.result import Audit
from foretoken.bench.output import figures, report
from foretoken.bench.workloads import FUNCTIONS
from foretoken.speculation import SpeculativeConfig
from options import Output
from servers import engine_serving, listed_model

ENGINES = {"vllm in process": "vllm", "openvino": "openvino"}


@contextmanager
def running(engine: str, depth: int, budget: int) -> Iterator[Endpoint]:
    """Runs a server or an engine with speculation and without. Yields what to audit."""
    target, draft = str(zoo.path("target")), str(zoo.path("draft"))
    if engine in ENGINES:
        method = SpeculativeConfig(method="draft_model", model=draft, num_speculative_tokens=depth)
        with started(ENGINES[engine], target, method) as pair:
            name = f"{pair.name} {pair.version}"
            yield Endpoint(name, target, budget=budget, checkpoint=pair.checkpoint, engines=pair)
    elif engine == "foretoken":  # a request can switch its speculation off
        with engine_serving(engine, target, draft, depth) as url:
            yield Endpoint(url, listed_model(url), budget=budget)
    else:
        with engine_serving(engine, target, draft, 0) as baseline, engine_serving(engine, target, draft, depth) as url:
            yield Endpoint(url, listed_model(url), baseline=baseline, budget=budget)


def tabled(audits: Sequence[tuple[str, Audit]]) -> Table:
    """Returns a table with a line for each check."""
    rows: list[tuple[str, ...]] = []
    for engine, audit in audits:
        rows += [(engine, check.name, str(check.outcome), check.evidence) for check in audit.checks]
        rows.append((engine, "", str(audit.outcome).upper(), f"in {audit.seconds:.0f} s"))
    return figures(("engine", "check", "verdict", "evidence"), rows)


def main(
    engine: Annotated[list[str], typer.Option(help="foretoken, vllm, llamacpp, openvino, or vllm in process.")],
    depth: Annotated[int, typer.Option(help="Draft length.")] = 4,
    budget: Annotated[int, typer.Option(help="Generated tokens of each.")] = 12_000,
    output: Output = None,
) -> None:
    """Audits one after the other, and prints what every check found."""
    audits = []
    for name in engine:
        with running(name, depth, budget) as endpoint:
            audits.append((name, audit_endpoint(endpoint, FUNCTIONS)))
    rows = [{"engine": name} | audit.to_dict() for name, audit in audits]
    report([tabled(audits)], {"depth": depth, "budget": budget}, output, audits=rows)


if __name__ == "__main__":
    typer.run(main)
