"""``foretoken audit --endpoint`` and ``--engine``: audits of a server, or of an engine in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.bench.workloads import prompts_or_functions
from foretoken.cli.audit_options import AuditOptions, announcing, budget
from foretoken.cli.grouped import option
from foretoken.cli.options import ModelOptions, PatienceOptions, ServerOptions
from foretoken.cli.theme import staged, waiting
from foretoken.core.errors import InvalidRequest
from foretoken.propose.methods import NONE

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.audit.endpoint import Endpoint
    from foretoken.audit.result import Audit


@dataclass(frozen=True, kw_only=True)
class AuditServerOptions:
    """The server to audit."""

    endpoint: str | None = option(
        None, "Audit this OpenAI-compatible server; --model is its name for the model.", metavar="URL"
    )
    pair: ServerOptions
    checkpoint: str | None = option(None, "Compute the endpoint's target distribution here, from this model.")
    concurrency: int = option(8, "Requests to the endpoint at a time.", min=1)
    waiting: PatienceOptions
    dry_run: bool = option(False, "Only show what auditing the endpoint costs.", "--dry-run")


def audit_server(
    url: str,
    options: AuditServerOptions,
    models: ModelOptions,
    compared: AuditOptions,
    journal: Path | None,
    notes: Console,
) -> Audit:
    """Audits a server, after its costs were shown. Raises InvalidRequest and ForetokenError."""
    arguments = options.pair.arguments()
    if models.draft_model is not None or models.speculative_config is not None:
        raise InvalidRequest("the endpoint chooses its own draft; omit --draft-model and --speculative-config")
    tokens, seconds = budget(compared.budget)
    if models.model is None:
        raise InvalidRequest("--endpoint needs --model, the model's name on that server")
    from foretoken.audit.endpoint import Endpoint

    texts = prompts_or_functions(compared.prompts)
    endpoint = Endpoint(
        url=url,
        model=models.model,
        budget=tokens,
        seconds=seconds,
        concurrency=options.concurrency,
        checkpoint=options.checkpoint,
        seed=compared.seed,
        patience=options.waiting.patience(),
        journal=journal,
        **arguments,
    )
    return _audited(endpoint, texts, notes, options.dry_run)


def audit_engine(
    engine: str,
    models: ModelOptions,
    compared: AuditOptions,
    checkpoint: str | None,
    concurrency: int,
    notes: Console,
) -> Audit:
    """Audits an engine in processes of its own, like a server. Raises InvalidRequest and ForetokenError."""
    tokens, seconds = budget(compared.budget)
    from foretoken.audit.endpoint import Endpoint
    from foretoken.audit.endpoint.engines import started
    from foretoken.audit.run import NOTHING

    texts, (target, config) = prompts_or_functions(compared.prompts), models.pair()
    if config.method_in_force == NONE:
        raise InvalidRequest(NOTHING)
    with ExitStack() as stack:
        with waiting(notes, f"loading {engine} twice, with speculation and without"):
            pair = stack.enter_context(started(engine, target, config))
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
        return _audited(endpoint, texts, notes)


def _audited(endpoint: Endpoint, prompts: Sequence[str], notes: Console, dry_run: bool = False) -> Audit:
    from foretoken.audit.endpoint import audit_endpoint

    with staged(notes) as watch:
        return audit_endpoint(endpoint, prompts, announcing(notes, dry_run), watch)
