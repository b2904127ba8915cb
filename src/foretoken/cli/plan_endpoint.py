"""``foretoken plan --endpoint``: plans the speculation of a server from outside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.audit_options import announcing, budget
from foretoken.cli.files import journal
from foretoken.cli.grouped import option
from foretoken.cli.options import PatienceOptions, ReportOptions, ServerOptions
from foretoken.cli.plan_options import CandidateOptions, SampleOptions
from foretoken.cli.theme import staged, wide_console
from foretoken.core.errors import ForetokenError, InvalidRequest

if TYPE_CHECKING:
    from foretoken.plan.endpoint import PlannedEndpoint

CANNOT_TELL = 3  # exit code


@dataclass(frozen=True, kw_only=True)
class PlanServerOptions:
    """The server to plan for."""

    endpoint: str | None = option(
        None, "Plan for this OpenAI-compatible server; --model is its name for the model.", metavar="URL"
    )
    pair: ServerOptions
    depth: int | None = option(None, "The endpoint's draft length. [as it says]", min=1)
    concurrency: list[int] | None = option(None, "Requests to the endpoint at once (repeatable). [1, 4, 16]", min=1)
    checkpoint: str | None = option(None, "The endpoint's model here, to predict --draft-model and --heads.")
    earlier: list[Path] | None = option(
        None, "Record of the endpoint's plan at another draft length.", "--with", metavar="FILE"
    )
    budget: str | None = option(None, "To spend on the endpoint: a time such as 5m, or tokens such as 60ktokens.")
    waiting: PatienceOptions
    dry_run: bool = option(
        False, "Only show what measuring the endpoint costs; without --endpoint, the memory of the models.", "--dry-run"
    )

    def planned(
        self, url: str, candidates: CandidateOptions, sample: SampleOptions, journal: Path | None
    ) -> PlannedEndpoint:
        """Returns the server and the settings of its measurement. Raises InvalidRequest."""
        if candidates.model is None:
            raise InvalidRequest("--endpoint needs --model, the model's name on that server")
        temperatures, configs = sample.temperature or [0.0], candidates.configs or [{}]
        if len(temperatures) > 1 or len(configs) > 1:
            raise InvalidRequest("a plan for a server takes one --temperature and one --speculative-config, its own")
        drafts, heads = candidates.draft_model or (), candidates.heads or ()
        if (drafts or heads) and self.checkpoint is None:
            raise InvalidRequest(
                "--draft-model and --heads of a server's plan need --checkpoint, the served model here"
            )
        tokens, seconds = budget(self.budget) if self.budget is not None else (None, None)
        earlier = [_record(file) for file in self.earlier or ()]
        arguments, current = self.pair.arguments(), configs[0]
        from foretoken.plan.endpoint import LocalModels, PlannedEndpoint, ServerPair

        return PlannedEndpoint(
            pair=ServerPair(url, candidates.model, patience=self.waiting.patience(), **arguments),
            depth=self.depth or current.pop("num_speculative_tokens", None),
            temperature=temperatures[0],
            concurrency=tuple(dict.fromkeys(self.concurrency or (1, 4, 16))),
            max_tokens=sample.max_tokens,
            budget=tokens,
            seconds=seconds,
            current=current,
            models=LocalModels(self.checkpoint, drafts, heads),
            earlier=earlier,
            journal=journal,
        )


def plan_for_endpoint(
    url: str, options: PlanServerOptions, candidates: CandidateOptions, sample: SampleOptions, report: ReportOptions
) -> int:
    """Measures, predicts and prints. Returns the exit code. Raises InvalidRequest and ForetokenError."""
    endpoint = options.planned(url, candidates, sample, journal(report.output))
    from foretoken.plan.endpoint import plan_endpoint
    from foretoken.plan.endpoint.render import rendered, verdict_lines
    from foretoken.report.plan_endpoint import page

    texts = sample.texts()
    notes = wide_console(report.color, stderr=True)

    with staged(notes) as say:
        result = plan_endpoint(endpoint, texts, announcing(notes, options.dry_run), say)
    record = result.to_dict()
    if options.dry_run and not result.because:
        report.write(record["setting"])
        return 0
    if result.choice is not None:
        record["verdict"] = verdict_lines(result.choice, result.rows)

    facts = {key: value for key, value in result.facts.items() if not isinstance(value, dict)}
    report.publish(record, lambda: rendered(result), lambda: page(record), facts)
    return CANNOT_TELL if result.because else 0


def _record(file: Path) -> Mapping[str, Any]:
    """Returns the record of an earlier plan. Raises ForetokenError."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(record, dict):
            return record
    except (OSError, ValueError) as error:
        raise ForetokenError(f"--with {file}: expected a record of plan --endpoint ({error})") from error
    raise ForetokenError(f"--with {file}: expected a record of plan --endpoint")
