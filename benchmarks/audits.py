"""Is every proposer exact? Runs ``foretoken audit`` on each proposer of the bundled models and on transformers.

    python benchmarks/audits.py --budget 120 --output audits.json

Prints a line for each: the verdict, and the outcome of every check. Budgets are seconds. Nothing here is a speed, so
other work on the machine only reduces the power of the tests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.progress import track
from rich.table import Table

from exactness_grid import ALL, Config, label, named
from foretoken import LLM, zoo
from foretoken.audit import Audit, CheckOutcome, audit
from foretoken.audit.assisted import Assisted
from foretoken.bench.setting import cores, setting, wide_console
from foretoken.bench.workloads import load_prompts
from foretoken.speculation import SpeculativeConfig

ASSISTED: list[Config] = [{"method": "draft_model", "model": "draft"}, {"method": "ngram"}]
SIGNS = {
    CheckOutcome.PASSED: "yes",
    CheckOutcome.FAILED: "NO",
    CheckOutcome.INCONCLUSIVE: "?",
    CheckOutcome.SKIPPED: "-",
}


def table(results: Sequence[tuple[str, Audit]]) -> Table:
    """Returns a table with a line for each audit."""
    result = Table(box=box.MARKDOWN)
    result.add_column("proposer")
    for check in results[0][1].checks:
        result.add_column(check.name)
    result.add_column("verdict")
    for name, one in results:
        result.add_row(name, *(SIGNS[check.outcome] for check in one.checks), str(one.outcome))
    return result


def main(
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with a prompt each. [our own functions]")] = None,
    config: Annotated[list[str] | None, typer.Option(help="JSON; may be repeated. [every proposer]")] = None,
    budget: Annotated[float, typer.Option(min=1, help="Seconds for each.")] = 120.0,
    peers: Annotated[bool, typer.Option(help="transformers too, which may fail.")] = True,
    json_file: Annotated[Path | None, typer.Option("--output", help="Write setting and audits here.")] = None,
) -> None:
    """Runs all audits; the exit code is 1 if one of ours fails."""
    torch.set_num_threads(cores())
    texts = load_prompts(prompts) if prompts else None
    configs = [json.loads(text) for text in config] if config else ALL
    subjects: list[tuple[str, Any]] = [
        (label(each), lambda each=each: LLM(zoo.path("target"), speculative_config=named(each))) for each in configs
    ]
    if peers:
        subjects += [
            (
                f"transformers: {label(each)}",
                lambda each=each: Assisted(zoo.path("target"), SpeculativeConfig.of(named(each))),
            )
            for each in ASSISTED
        ]
    results = [(name, audit(make(), texts, budget=budget)) for name, make in track(subjects, transient=True)]
    console = wide_console()
    console.print(table(results))
    for name, one in results:
        for check in one.checks:
            if check.outcome in (CheckOutcome.FAILED, CheckOutcome.INCONCLUSIVE):
                console.print(f"{name}: {check.name} {check.outcome}: {check.evidence}", highlight=False)
    facts = setting() | {"budget": budget}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    if json_file is not None:
        rows = [{"proposer": name} | one.to_dict() for name, one in results]
        json_file.write_text(
            json.dumps({"setting": facts, "audits": rows}, indent=2, default=str) + "\n", encoding="utf-8"
        )
    ours = [one for name, one in results if not name.startswith("transformers")]
    raise typer.Exit(int(any(one.outcome is CheckOutcome.FAILED for one in ours)))


if __name__ == "__main__":
    typer.run(main)
