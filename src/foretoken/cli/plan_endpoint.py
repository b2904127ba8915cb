"""``foretoken plan --endpoint``: plans the speculation of a server from outside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.audit_endpoint import JOURNAL, budget
from foretoken.cli.files import publish, write_text
from foretoken.cli.theme import ColorMode, staged, wide_console
from foretoken.core.errors import ForetokenError, InvalidRequest

if TYPE_CHECKING:
    from foretoken.plan.endpoint import EndpointPlan, PlannedEndpoint

CANNOT_TELL = 3  # exit code


@dataclass(frozen=True)
class PlanEndpointOptions:
    """The options of the command that concern a server, as they were given."""

    url: str
    model: str | None
    baseline: str | None
    server: str
    api_key: str | None
    baseline_api_key: str | None
    depth: int | None
    temperatures: Sequence[float]
    concurrency: Sequence[int]
    max_tokens: int
    budget: str | None
    configs: Sequence[Mapping[str, Any]]
    checkpoint: str | None
    drafts: Sequence[str]
    heads: Sequence[str]
    earlier: Sequence[Path]
    timeout: float
    retries: int
    dry_run: bool
    prompts: Path | None
    count: int
    output: Path | None

    def endpoint(self) -> PlannedEndpoint:
        """Returns what to plan for. Raises InvalidRequest."""
        if self.model is None:
            raise InvalidRequest("--endpoint needs --model, the model's name on that server")
        if len(self.temperatures) > 1 or len(self.configs) > 1:
            raise InvalidRequest("a plan for a server takes one --temperature and one --speculative-config, its own")
        if (self.drafts or self.heads) and self.checkpoint is None:
            raise InvalidRequest(
                "--draft-model and --heads of a server's plan need --checkpoint, the served model here"
            )
        tokens, seconds = budget(self.budget) if self.budget is not None else (None, None)
        earlier = [_record(file) for file in self.earlier]
        from foretoken.endpoint.client import Patience
        from foretoken.endpoint.dialects import ServerKind

        if self.server not in list(ServerKind):
            raise InvalidRequest(f"--server must be {', '.join(ServerKind)}, got {self.server!r}")
        from foretoken.plan.endpoint import LocalModels, PlannedEndpoint, ServerPair

        patience = Patience(self.timeout, self.retries)
        kind = ServerKind(self.server)
        pair = ServerPair(self.url, self.model, self.baseline, kind, self.api_key, self.baseline_api_key, patience)
        current = dict(self.configs[0]) if self.configs else {}
        return PlannedEndpoint(
            pair=pair,
            depth=self.depth or current.pop("num_speculative_tokens", None),
            temperature=self.temperatures[0] if self.temperatures else 0.0,
            concurrency=tuple(dict.fromkeys(self.concurrency)),
            max_tokens=self.max_tokens,
            budget=tokens,
            seconds=seconds,
            current=current,
            models=LocalModels(self.checkpoint, self.drafts, self.heads),
            earlier=earlier,
            journal=None if self.output is None else self.output.with_name(self.output.name + JOURNAL),
        )


def plan_for_endpoint(options: PlanEndpointOptions, as_json: bool, html_file: Path | None, color: ColorMode) -> int:
    """Measures, foretells and prints. Returns the exit code. Raises InvalidRequest and ForetokenError."""
    endpoint = options.endpoint()
    from foretoken.bench.workloads import FUNCTIONS, load_prompts
    from foretoken.plan.endpoint import plan_endpoint
    from foretoken.plan.endpoint.render import costs_line, rendered, verdict_lines

    texts = load_prompts(options.prompts, options.count) if options.prompts else list(FUNCTIONS)[: options.count]
    notes, console = wide_console(color, stderr=True), wide_console(color)

    def announce(costs: Mapping[str, Any]) -> bool:
        notes.print(costs_line(costs), style="dim", markup=False, soft_wrap=True)
        return not options.dry_run

    with staged(notes) as say:
        result = plan_endpoint(endpoint, texts, announce, say)
    record = result.to_dict()
    if options.dry_run and not result.because:
        publish(record["setting"], lambda: None, as_json, options.output)
        return 0
    if result.choice is not None:
        record["verdict"] = verdict_lines(result.choice, result.rows)

    def show() -> None:
        for part in rendered(result):
            console.print(part, soft_wrap=not hasattr(part, "columns"))
        console.print(_facts(result), style="dim", markup=False)

    publish(record, show, as_json, options.output)
    if html_file is not None:
        from foretoken.report.plan_endpoint import page

        write_text(html_file, page(record))
    return CANNOT_TELL if result.because else 0


def _facts(plan: EndpointPlan) -> str:
    return ", ".join(f"{key} {value}" for key, value in plan.facts.items() if not isinstance(value, dict))


def _record(file: Path) -> Mapping[str, Any]:
    """Returns the record of an earlier plan. Raises ForetokenError."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(record, dict):
            return record
    except (OSError, ValueError) as error:
        raise ForetokenError(f"--with {file}: expected a record of plan --endpoint ({error})") from error
    raise ForetokenError(f"--with {file}: expected a record of plan --endpoint")
