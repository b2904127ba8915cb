"""``foretoken audit --engine``: audits an engine that runs in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from foretoken.cli.audit_options import AuditOptions, budget, costs
from foretoken.cli.options import ModelOptions
from foretoken.cli.theme import staged, waiting
from foretoken.core.errors import InvalidRequest
from foretoken.propose.methods import NONE

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.audit.result import Audit


def audit_engine(
    engine: str,
    models: ModelOptions,
    compared: AuditOptions,
    checkpoint: str | None,
    concurrency: int,
    notes: Console,
) -> Audit:
    """Audits an engine, after its costs were shown. Raises InvalidRequest and ForetokenError."""
    tokens, seconds = budget(compared.budget)
    from foretoken.audit.endpoint import Endpoint, audit_endpoint
    from foretoken.audit.endpoint.engines import started
    from foretoken.audit.run import NOTHING
    from foretoken.bench.workloads import prompts_or_functions

    texts, (target, config) = prompts_or_functions(compared.prompts), models.pair()
    if config.method_in_force == NONE:
        raise InvalidRequest(NOTHING)

    def announce(plan: Mapping[str, Any]) -> bool:
        notes.print(costs(plan), style="dim", markup=False, soft_wrap=True)
        return True

    with ExitStack() as stack:
        with waiting(notes, f"loading {engine} twice, with speculation and without"):
            pair = stack.enter_context(started(engine, target, config))
        watch = stack.enter_context(staged(notes))
        endpoint = Endpoint(
            url=f"{pair.name} {pair.version}",
            model=pair.model,
            budget=tokens,
            seconds=seconds,
            concurrency=concurrency,
            checkpoint=checkpoint or pair.checkpoint,
            seed=compared.seed,
            engines=pair,
        )
        return audit_endpoint(endpoint, texts, announce, watch)
