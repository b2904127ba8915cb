"""``foretoken plan``: predicts the speedup of speculation on this machine and text."""

from __future__ import annotations

import typer

from foretoken.cli.grouped import ALONE, SERVED, given_options, grouped, option, refuse_options
from foretoken.cli.options import MaxModelLen, ReportOptions
from foretoken.cli.plan_endpoint import PlanServerOptions, plan_for_endpoint
from foretoken.cli.plan_here import plan_here
from foretoken.cli.plan_memory import print_memory
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
    rtt: float | None = option(None, "What would drafting on a machine so far away gain? Simulated.", metavar="MS"),
    max_model_len: MaxModelLen = None,
    *,
    server: PlanServerOptions,
) -> None:
    """Predict tokens per step and speedup of every way to speculate, and recommend one, or none.

    The target writes a sample after the prompts; every candidate is evaluated on it, and steps are timed here. With
    --endpoint, of any OpenAI-compatible server, from outside; exit code 3: no plan is possible, with the reason. With
    --dry-run alone, the memory of target and drafter, which are not loaded; exit code 3: they do not fit.
    """
    if server.endpoint is not None:
        given = given_options(precision, engine)
        given += [option for option in given_options(sample) if option in ("--top-p", "--batch", "--turns")]
        refuse_options(given + (["--rtt"] if rtt is not None else []), SERVED)
        raise typer.Exit(plan_for_endpoint(server.endpoint, server, candidates, sample, report))
    refuse_options([option for option in given_options(server) if option != "--dry-run"], ALONE)
    precision.check()
    if server.dry_run:
        raise typer.Exit(print_memory(candidates, precision, max_model_len, report))
    if max_model_len is not None:
        raise InvalidRequest("--max-model-len belongs to --dry-run; leave it out")
    if not given_options(engine):
        plan_here(candidates, sample, precision, rtt, report)
        return
    if rtt is not None:
        raise InvalidRequest("--rtt is answered for foretoken's own engine; leave it or --engine out")
    plan_for_vllm(engine, candidates, sample, precision, report)
