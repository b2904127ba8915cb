"""False alarms of the audit of a server: twenty audits of a server without speculation.

    python benchmarks/endpoint_alarms.py --engine foretoken --output alarms.json
    python benchmarks/endpoint_alarms.py --engine vllm --minutes 3 --output alarms_vllm.json  # goes on when repeated
    python benchmarks/endpoint_alarms.py --endpoint http://127.0.0.1:8001 --model NAME

Both sides of the audit are the same server, so every check that fails is a false alarm. Every audit begins with other
prompts. Without ``--endpoint`` the engine's server is started on the bundled target.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.table import Table

from foretoken import zoo
from foretoken.audit.endpoint import Endpoint, audit_endpoint
from foretoken.audit.result import CheckOutcome
from foretoken.bench.output import figures, wide_console
from foretoken.bench.setting import setting
from foretoken.bench.workloads import FUNCTIONS
from servers import engine_serving, listed_model

console = wide_console()

_TURN = 3  # prompts by which each audit begins later, so that greedy texts are others as well

Record = dict[str, Any]


def resumed(file: Path | None, asked: Record) -> list[Record]:
    """Returns the audits of an earlier run with the same options."""
    if file is None or not file.exists():
        return []
    record = json.loads(file.read_text())
    if differing := [name for name, value in asked.items() if record[name] != value]:
        raise typer.BadParameter(f"{file} was made with another {' and '.join(differing)}; choose another --output")
    return list(record["audits"])


def failing(audit: Record) -> bool:
    """Returns whether any check failed."""
    return any(check["outcome"] == CheckOutcome.FAILED for check in audit["checks"])


def tabled(audits: Sequence[Record]) -> Table:
    """Returns for each check how often each outcome was reached."""
    outcomes = [str(outcome) for outcome in CheckOutcome]
    counts: dict[str, Counter[str]] = {}
    for audit in audits:
        for check in audit["checks"]:
            counts.setdefault(check["name"], Counter())[check["outcome"]] += 1
    rows = ((name, *(seen[outcome] or "" for outcome in outcomes)) for name, seen in counts.items())
    return figures(("check", *outcomes), rows)


def main(
    engine: Annotated[str, typer.Option(help="foretoken, vllm or llamacpp.")] = "foretoken",
    endpoint: Annotated[str | None, typer.Option(help="A server without speculation that runs already.")] = None,
    model: Annotated[str | None, typer.Option(help="Its name for the model. [the first that it lists]")] = None,
    audits: Annotated[int, typer.Option(help="Number of audits.")] = 20,
    budget: Annotated[int, typer.Option(help="Generated tokens of each.")] = 12_000,
    level: Annotated[float, typer.Option(help="Probability of failing an exact server, over all checks.")] = 0.01,
    minutes: Annotated[float, typer.Option(help="No audit begins later than that.")] = 600.0,
    json_file: Annotated[
        Path | None, typer.Option("--output", help="Write the outcomes there; audits that it has are not repeated.")
    ] = None,
) -> None:
    """Prints how often each check passed, failed, or was inconclusive."""
    end, asked = monotonic() + 60.0 * minutes, {"engine": engine, "budget": budget, "level": level}
    made = resumed(json_file, asked)
    started = engine_serving(engine, str(zoo.path("target")), "", 0)
    with started if endpoint is None else nullcontext(endpoint) as url:
        name = model or listed_model(url)
        for seed in range(len(made), audits):
            if monotonic() > end:
                break
            subject = Endpoint(url, name, baseline=url, budget=budget, seed=seed, level=level)
            first = _TURN * seed % len(FUNCTIONS)
            made.append(audit_endpoint(subject, [*FUNCTIONS[first:], *FUNCTIONS[:first]]).to_dict())
            console.print(f"audit {seed + 1}: {made[-1]['outcome']}, {made[-1]['seconds']:.0f} s", style="dim")
            if json_file is not None:
                record = {"setting": setting(), **asked, "failed": sum(map(failing, made)), "audits": made}
                json_file.write_text(json.dumps(record, indent=2, default=str) + "\n")
    console.print(tabled(made))
    failed, expected = sum(map(failing, made)), len(made) * level
    console.print(f"{failed} of {len(made)} audits failed; at the level of {level:g}, {expected:.2g} are expected")


if __name__ == "__main__":
    typer.run(main)
