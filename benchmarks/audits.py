"""Is every proposer exact? Runs ``foretoken audit`` on each proposer of the bundled models and on transformers.

    python benchmarks/audits.py --budget 120 --output audits.json

Prints a line for each: the verdict, and the outcome of every check. Budgets are seconds. Nothing here is a speed, so
other work on the machine only reduces the power of the tests.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from rich.table import Table

from exactness_grid import ALL
from foretoken import LLM, zoo
from foretoken.audit import Audit, CheckOutcome, audit
from foretoken.audit.implementations import Assisted
from foretoken.bench.output import cores, figures, report
from foretoken.bench.workloads import load_prompts
from foretoken.speculation import SpeculativeConfig
from options import Config, Output, Prompts, label, with_models

ASSISTED: list[Config] = [{"method": "draft_model", "model": "draft"}, {"method": "ngram"}]
SIGNS = {
    CheckOutcome.PASSED: "yes",
    CheckOutcome.FAILED: "NO",
    CheckOutcome.INCONCLUSIVE: "?",
    CheckOutcome.SKIPPED: "-",
}


def table(results: Sequence[tuple[str, Audit]]) -> Table:
    checks = [check.name for check in results[0][1].checks]
    rows = [(name, *(SIGNS[check.outcome] for check in audit.checks), str(audit.outcome)) for name, audit in results]
    return figures(("proposer", *checks, "verdict"), rows)


def main(
    prompts: Prompts = None,
    config: Annotated[list[str] | None, typer.Option(help="JSON; may be repeated. [every proposer]")] = None,
    budget: Annotated[float, typer.Option(min=1, help="Seconds for each.")] = 120.0,
    peers: Annotated[bool, typer.Option(help="transformers too, which may fail.")] = True,
    output: Output = None,
) -> None:
    """Runs all audits; the exit code is 1 if one of ours fails."""
    torch.set_num_threads(cores())
    texts = load_prompts(prompts) if prompts else None
    configs = [json.loads(text) for text in config] if config else ALL
    subjects: list[tuple[str, Any]] = [
        (label(each), lambda each=each: LLM(zoo.path("target"), speculative_config=with_models(each)))
        for each in configs
    ]
    if peers:
        subjects += [
            (
                f"transformers: {label(each)}",
                lambda each=each: Assisted(zoo.path("target"), SpeculativeConfig.of(with_models(each))),
            )
            for each in ASSISTED
        ]
    results = [(name, audit(make(), texts, budget=budget)) for name, make in track(subjects, transient=True)]
    doubtful = [
        f"{name}: {check.name} {check.outcome}: {check.evidence}"
        for name, result in results
        for check in result.checks
        if check.outcome in (CheckOutcome.FAILED, CheckOutcome.INCONCLUSIVE)
    ]
    rows = [{"proposer": name} | result.to_dict() for name, result in results]
    report([table(results), *doubtful], {"budget": budget}, output, audits=rows)
    ours = [result for name, result in results if not name.startswith("transformers")]
    raise typer.Exit(int(any(result.outcome is CheckOutcome.FAILED for result in ours)))


if __name__ == "__main__":
    typer.run(main)
