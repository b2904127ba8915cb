"""How often does the audit of a server fail one that decodes plainly? Twenty audits of a server without speculation.

    python benchmarks/endpoint_alarms.py --budget 20000 --output alarms.json
    python benchmarks/endpoint_alarms.py --endpoint http://127.0.0.1:8001 --model NAME

Both sides of the audit are the same server, so every check that fails is a false alarm. Without ``--endpoint`` it is
one of our own, on the bundled target.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from clients import serving
from foretoken import zoo
from foretoken.audit.chance import ALPHA
from foretoken.audit.endpoint import Endpoint, audit_endpoint
from foretoken.audit.result import Audit, CheckOutcome
from foretoken.bench.http_client import listed_models
from foretoken.bench.setting import setting, wide_console
from foretoken.bench.workloads import FUNCTIONS

console = wide_console()


def failures(audits: list[Audit]) -> dict[str, Counter[str]]:
    """Returns for each check how often each outcome was reached."""
    counts: dict[str, Counter[str]] = {}
    for audit in audits:
        for check in audit.checks:
            counts.setdefault(check.name, Counter())[str(check.outcome)] += 1
    return counts


def main(
    endpoint: Annotated[str | None, typer.Option(help="A server without speculation. [one of our own]")] = None,
    model: Annotated[str | None, typer.Option(help="Its name for the model. [the first that it lists]")] = None,
    audits: Annotated[int, typer.Option(help="Number of audits.")] = 20,
    budget: Annotated[int, typer.Option(help="Generated tokens of each.")] = 20_000,
    json_file: Annotated[Path | None, typer.Option("--output", help="Write the outcomes there.")] = None,
) -> None:
    """Prints how often each check passed, failed, or was inconclusive."""
    own = ("--model", str(zoo.path("target")), "--speculative-config", '{"method": "none"}')
    made = []
    with contextlib.nullcontext((endpoint, 0)) if endpoint else serving(*own) as (url, _):
        name = model or str(listed_models(url, None)[0]["id"])
        for seed in range(audits):
            made.append(audit_endpoint(Endpoint(url, name, baseline=url, budget=budget, seed=seed), FUNCTIONS))
            console.print(f"audit {seed + 1}: {made[-1].outcome}, {made[-1].seconds:.0f} s", style="dim")
    counts = failures(made)
    outcomes = [str(outcome) for outcome in CheckOutcome]
    table = Table(box=box.MARKDOWN)
    for head in ("check", *outcomes):
        table.add_column(head, justify="left" if head == "check" else "right")
    for check, seen in counts.items():
        table.add_row(check, *(str(seen[outcome] or "") for outcome in outcomes))
    console.print(table)
    failed = sum(any(check.outcome is CheckOutcome.FAILED for check in audit.checks) for audit in made)
    console.print(f"{failed} of {audits} audits failed; at the level of {ALPHA:g}, {audits * ALPHA:.2g} are expected")
    if json_file is not None:
        record = {"setting": setting(), "budget": budget, "failed": failed, "audits": [each.to_dict() for each in made]}
        json_file.write_text(json.dumps(record, indent=2, default=str) + "\n")


if __name__ == "__main__":
    typer.run(main)
