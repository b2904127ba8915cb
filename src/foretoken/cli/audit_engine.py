"""``foretoken audit --engine``: audits an engine that runs in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.audit_endpoint import budget, costs

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.audit.result import Audit


@dataclass(frozen=True)
class EngineOptions:
    """The options of the command that concern an engine, as they were given."""

    engine: str
    model: str | None
    draft_model: str | None
    config: Mapping[str, Any] | None
    checkpoint: str | None
    budget: str
    concurrency: int
    seed: int
    prompts: Path | None


def run_engine_audit(options: EngineOptions, notes: Console) -> Audit:
    """Audits an engine, after its costs were shown. Raises InvalidRequest and ForetokenError."""
    tokens, seconds = budget(options.budget)
    from foretoken import zoo
    from foretoken.audit.endpoint import Endpoint, audit_endpoint
    from foretoken.bench.workloads import FUNCTIONS, load_prompts
    from foretoken.cli.theme import staged, waiting
    from foretoken.endpoint.engines import started
    from foretoken.speculation import SpeculativeConfig, with_draft

    texts = load_prompts(options.prompts) if options.prompts is not None else FUNCTIONS
    config, draft = SpeculativeConfig.of(options.config), options.draft_model
    if options.model is None and draft is None and config.model is None and config.method in (None, "draft_model"):
        draft = str(zoo.path("draft"))

    def announce(plan: Mapping[str, Any]) -> bool:
        notes.print(costs(plan), style="dim", markup=False, soft_wrap=True)
        return True

    with ExitStack() as stack:
        with waiting(notes, f"loading {options.engine} twice, with speculation and without"):
            running = started(options.engine, options.model or zoo.path("target"), with_draft(config, draft))
            pair = stack.enter_context(running)
        watch = stack.enter_context(staged(notes))
        endpoint = Endpoint(
            url=f"{pair.name} {pair.version}",
            model=pair.model,
            budget=tokens,
            seconds=seconds,
            concurrency=options.concurrency,
            checkpoint=options.checkpoint or pair.checkpoint,
            seed=options.seed,
            engines=pair,
        )
        return audit_endpoint(endpoint, texts, announce, watch)
