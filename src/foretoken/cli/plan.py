"""``foretoken plan``: predicts the speedup of speculation on this machine and text."""

from __future__ import annotations

from typing import Annotated

import typer

from foretoken.cli.files import check_alone, check_served
from foretoken.cli.grouped import grouped
from foretoken.cli.options import ReportOptions
from foretoken.cli.plan_endpoint import PlanServerOptions, plan_for_endpoint
from foretoken.cli.plan_here import plan_here
from foretoken.cli.plan_options import CandidateOptions, PrecisionOptions, SampleOptions
from foretoken.cli.plan_vllm import PlanEngineOptions, plan_for_vllm
from foretoken.core.errors import InvalidRequest


@grouped
def plan(
    candidates: CandidateOptions,
    sample: SampleOptions,
    precision: PrecisionOptions,
    report: ReportOptions,
    engine: PlanEngineOptions,
    rtt: Annotated[
        float | None, typer.Option(metavar="MS", help="What would drafting on a machine so far away gain? Simulated.")
    ] = None,
    *,
    server: PlanServerOptions,
) -> None:
    """Predict tokens per step and speedup of every way to speculate, and recommend one, or none.

    The target writes a sample after the prompts; every candidate is evaluated on it, and steps are timed here. With
    --endpoint, of any OpenAI-compatible server, from outside; exit code 3: no plan is possible, with the reason.
    """
    if server.endpoint is not None:
        check_served(
            {
                "--top-p": sample.top_p != 1.0,
                "--batch": bool(sample.batch),
                "--turns": sample.turns != SampleOptions.turns,
                "--quantization": precision.quantization is not None,
                "--weight-format": precision.weight_format != "auto",
                "--kv-cache-dtype": precision.kv_cache_dtype != "auto",
                "--dtype": precision.dtype != "auto",
                "--engine": engine.engine != "foretoken",
                "--engine-python": engine.engine_python is not None,
                "--engine-args": engine.engine_args is not None,
                "--engine-alone": engine.engine_alone,
                "--rtt": rtt is not None,
            }
        )
        raise typer.Exit(plan_for_endpoint(server.endpoint, server, candidates, sample, report))
    check_alone(
        {
            "--baseline": server.pair.baseline,
            "--depth": server.depth,
            "--concurrency": server.concurrency,
            "--checkpoint": server.checkpoint,
            "--with": server.earlier,
            "--budget": server.budget,
            "--dry-run": server.dry_run,
        }
    )
    precision.check()
    if not engine.given:
        plan_here(candidates, sample, precision, rtt, report)
        return
    if rtt is not None:
        raise InvalidRequest("--rtt is answered for foretoken's own engine; leave it or --engine out")
    plan_for_vllm(engine, candidates, sample, precision, report)
