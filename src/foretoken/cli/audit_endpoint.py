"""``foretoken audit --endpoint``: audits the speculation of a server from outside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.audit.result import Audit

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
THOUSANDS = {"": 1, "k": 1_000, "M": 1_000_000}
JOURNAL = ".partial"  # ending of the file that keeps the answers of an audit under way


@dataclass(frozen=True)
class EndpointOptions:
    """The options of the command that concern a server, as they were given."""

    url: str
    model: str | None
    baseline: str | None
    server: str
    api_key: str | None
    baseline_api_key: str | None
    budget: str
    concurrency: int
    checkpoint: str | None
    seed: int
    timeout: float
    retries: int
    dry_run: bool
    prompts: Path | None
    output: Path | None


def run_endpoint_audit(options: EndpointOptions, notes: Console) -> Audit:
    """Audits a server, after its costs were shown. Raises InvalidRequest and ForetokenError."""
    tokens, seconds = budget(options.budget)
    if options.model is None:
        raise InvalidRequest("--endpoint needs --model, the model's name on that server")
    from foretoken.audit.endpoint import Endpoint, Patience, audit_endpoint
    from foretoken.bench.workloads import FUNCTIONS, load_prompts
    from foretoken.cli.theme import staged
    from foretoken.endpoint.dialects import ServerKind

    texts = load_prompts(options.prompts) if options.prompts is not None else FUNCTIONS
    endpoint = Endpoint(
        url=options.url,
        model=options.model,
        baseline=options.baseline,
        kind=ServerKind(options.server),
        key=options.api_key,
        baseline_key=options.baseline_api_key,
        budget=tokens,
        seconds=seconds,
        concurrency=options.concurrency,
        checkpoint=options.checkpoint,
        seed=options.seed,
        patience=Patience(options.timeout, options.retries),
        journal=None if options.output is None else options.output.with_name(options.output.name + JOURNAL),
    )

    def announce(plan: Mapping[str, Any]) -> bool:
        notes.print(costs(plan), style="dim", markup=False, soft_wrap=True)
        return not options.dry_run

    with staged(notes) as watch:
        return audit_endpoint(endpoint, texts, announce, watch)


def costs(plan: Mapping[str, Any]) -> str:
    """Returns what an audit will cost and find, in one line."""
    sent = plan["sent"]
    return (
        f"about {plan['requests']:,} requests, {plan['prompt_tokens']:,} prompt tokens and {plan['tokens']:,} "
        f"generated tokens; {sent['requests']:,} requests and {sent['tokens']:,} generated tokens are spent already, "
        f"to find this out; {plan['power']}"
    )


def budget(text: str) -> tuple[int | None, float | None]:
    """Returns a budget in tokens or in seconds, the other is None. Raises InvalidRequest."""
    counted = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kM]?)\s*tok(?:en)?s?", text.strip())
    if counted is not None and float(counted[1]) > 0.0:
        return int(float(counted[1]) * THOUSANDS[counted[2]]), None
    return None, duration(text, "a time such as 90s, 5m or 1h, or for an endpoint tokens such as 60ktokens")


def duration(text: str, expected: str = "a time such as 90s, 5m or 1h") -> float:
    """Returns the seconds of ``--budget``. Raises InvalidRequest."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None or float(match[1]) == 0.0:
        raise InvalidRequest(f"--budget must be {expected}, got {text!r}")
    return float(match[1]) * UNITS[match[2]]
