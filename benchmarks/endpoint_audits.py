"""What does the audit find in servers and engines of others, each with a draft model beside the same without it?

    python benchmarks/endpoint_audits.py --engine foretoken --engine llamacpp --output audits.json
    python benchmarks/endpoint_audits.py --engine vllm --engine "vllm in process" --engine openvino

The target and the draft are the bundled ones, which the server or the engine computes in bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from clients import serving
from foretoken import zoo
from foretoken.audit.endpoint import Endpoint, audit_endpoint
from foretoken.audit.endpoint.engines import started
from foretoken.audit.result import Audit
from foretoken.bench.setting import setting, wide_console
from foretoken.bench.workloads import FUNCTIONS
from foretoken.speculation import SpeculativeConfig
from servers import eager_serving, listed_model

ENGINES = {"vllm in process": "vllm", "openvino": "openvino"}
console = wide_console()


@contextmanager
def running(engine: str, depth: int, budget: int) -> Iterator[Endpoint]:
    """Runs a server or an engine with speculation and without. Yields what to audit."""
    target, draft = str(zoo.path("target")), str(zoo.path("draft"))
    if engine in ENGINES:
        method = SpeculativeConfig(method="draft_model", model=draft, num_speculative_tokens=depth)
        with started(ENGINES[engine], target, method) as pair:
            name = f"{pair.name} {pair.version}"
            yield Endpoint(name, target, budget=budget, checkpoint=pair.checkpoint, engines=pair)
    elif engine == "foretoken":
        config = json.dumps({"method": "draft_model", "model": draft, "num_speculative_tokens": depth})
        with serving("--model", target, "--speculative-config", config) as (url, _):
            yield Endpoint(url, listed_model(url), budget=budget)
    else:
        with eager_serving(engine, target, "", 0) as baseline, eager_serving(engine, target, draft, depth) as url:
            yield Endpoint(url, listed_model(url), baseline=baseline, budget=budget)


def tabled(audits: Sequence[tuple[str, Audit]]) -> Table:
    """Returns a table with a line for each check."""
    table = Table(box=box.MARKDOWN)
    for head in ("engine", "check", "verdict", "evidence"):
        table.add_column(head, overflow="fold")
    for engine, audit in audits:
        for check in audit.checks:
            table.add_row(engine, check.name, str(check.outcome), check.evidence)
        table.add_row(engine, "", str(audit.outcome).upper(), f"in {audit.seconds:.0f} s")
    return table


def main(
    engine: Annotated[list[str], typer.Option(help="foretoken, vllm, llamacpp, openvino, or vllm in process.")],
    depth: Annotated[int, typer.Option(help="Draft length.")] = 4,
    budget: Annotated[int, typer.Option(help="Generated tokens of each.")] = 12_000,
    json_file: Annotated[Path | None, typer.Option("--output", help="Write setting and audits there.")] = None,
) -> None:
    """Audits one after the other, and prints what every check found."""
    audits = []
    for name in engine:
        with running(name, depth, budget) as endpoint:
            audits.append((name, audit_endpoint(endpoint, FUNCTIONS)))
    console.print(tabled(audits))
    if json_file is not None:
        rows = [{"engine": name} | audit.to_dict() for name, audit in audits]
        record = {"setting": setting(), "depth": depth, "budget": budget, "audits": rows}
        json_file.write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
