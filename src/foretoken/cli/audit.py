"""``foretoken audit``: tests whether a pair is exact."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.audit_endpoint import EndpointOptions, duration, run_endpoint_audit
from foretoken.cli.audit_engine import EngineOptions, run_engine_audit
from foretoken.cli.files import check_alone, check_places, publish, write_text
from foretoken.cli.generate import speculative
from foretoken.cli.options import (
    ApiKey,
    Baseline,
    BaselineKey,
    DraftModel,
    Dtype,
    Html,
    Json,
    Output,
    Retries,
    ServerName,
    Speculation,
    Target,
    Timeout,
)
from foretoken.cli.theme import ColorMode, staged, waiting, wide_console
from foretoken.core.errors import InvalidRequest
from foretoken.models.options import check_dtype

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from foretoken.audit.result import Audit
    from foretoken.audit.subject import Audited
    from foretoken.llm import LLM

CODES = {"passed": 0, "failed": 1, "inconclusive": 3}
STYLES = {"passed": "green", "failed": "bold red", "inconclusive": "yellow", "skipped": "dim"}
MARKS = {"passed": "✓", "failed": "✗", "inconclusive": "?", "skipped": "-"}


class Implementation(StrEnum):
    """The implementation whose speculation is audited."""

    FORETOKEN = "foretoken"
    TRANSFORMERS = "transformers"
    VLLM = "vllm"
    OPENVINO = "openvino"


def audit(
    model: Target = None,
    draft_model: DraftModel = None,
    speculative_config: Speculation = None,
    engine: Annotated[
        Implementation,
        typer.Option(
            help="Whose speculation; transformers' is audited with its defaults, vllm and openvino from outside."
        ),
    ] = Implementation.FORETOKEN,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help='JSON lines with a "prompt" each. [our own functions]')
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="As 90s, 5m or 1h, for an endpoint also as 60ktokens; more finds smaller errors."
        ),
    ] = "2m",
    temperature: Annotated[float, typer.Option(help="Of the sampled texts; above 0.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of all sampling.")] = 0,
    dtype: Dtype = "auto",
    float32: Annotated[bool, typer.Option(help="Compare seeded texts in float32 as well.")] = True,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Audit this OpenAI-compatible server; --model is its name for the model."),
    ] = None,
    baseline: Baseline = None,
    server: ServerName = "auto",
    api_key: ApiKey = None,
    baseline_api_key: BaselineKey = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Compute the endpoint's target distribution here, from this model.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to the endpoint at a time.")] = 8,
    timeout: Timeout = 120.0,
    retries: Retries = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what auditing the endpoint costs.")] = False,
    as_json: Json = False,
    output: Output = None,
    html_file: Html = None,
    color: Annotated[ColorMode, typer.Option(help="Colours of the verdicts.")] = ColorMode.AUTO,
) -> None:
    """Test whether speculation changes the output (greedy, sampled, seeded), and whether the test would notice.

    With --endpoint, of any OpenAI-compatible server, from outside. The answers are kept beside --output until there
    is a verdict, so that an interrupted audit goes on where it stopped.

    Exit code: 0 passed, 1 failed, 3 inconclusive (no error was seen, but the test was too weak to see one).
    """
    check_places(output=output, html=html_file)
    out, notes = wide_console(color), wide_console(color, stderr=True)
    if endpoint is not None:
        _check_server(server, draft_model, speculative_config)
        given = EndpointOptions(
            url=endpoint,
            model=model,
            baseline=baseline,
            server=server,
            api_key=api_key,
            baseline_api_key=baseline_api_key,
            budget=budget,
            concurrency=concurrency,
            checkpoint=checkpoint,
            seed=seed,
            timeout=timeout,
            retries=retries,
            dry_run=dry_run,
            prompts=prompts,
            output=output,
        )
        result = run_endpoint_audit(given, notes)
        if dry_run:
            publish(result.subject, lambda: None, as_json, output)
            return
    elif engine in (Implementation.VLLM, Implementation.OPENVINO):
        check_alone({"--baseline": baseline, "--dry-run": dry_run})
        asked = EngineOptions(
            engine=engine,
            model=model,
            draft_model=draft_model,
            config=speculative(speculative_config),
            checkpoint=checkpoint,
            budget=budget,
            concurrency=concurrency,
            seed=seed,
            prompts=prompts,
        )
        result = run_engine_audit(asked, notes)
    else:
        check_alone({"--baseline": baseline, "--checkpoint": checkpoint, "--dry-run": dry_run})
        seconds = duration(budget)
        check_dtype(dtype)
        from foretoken.audit.run import audit as run
        from foretoken.bench.workloads import load_prompts

        texts = load_prompts(prompts) if prompts is not None else None
        with waiting(notes, f"loading {model or 'the bundled pair'}"):
            subject = _subject(engine, model, draft_model, speculative_config, dtype, seed)
        with staged(notes) as watch:
            result = run(
                subject, texts, budget=seconds, temperature=temperature, seed=seed, float32=float32, watch=watch
            )
    record = result.to_dict()
    if html_file is not None:
        from foretoken.report.audit import page

        write_text(html_file, page(record))
    publish(record, lambda: _show(result, out), as_json, output)
    raise typer.Exit(CODES[result.outcome])


def _check_server(server: str, draft: str | None, config: str | None) -> None:
    from foretoken.endpoint.dialects import ServerKind

    if server not in list(ServerKind):
        raise InvalidRequest(f"--server must be {', '.join(ServerKind)}, got {server!r}")
    if draft is not None or config is not None:
        raise InvalidRequest("the endpoint chooses its own draft; leave out --draft-model and --speculative-config")


def _subject(
    engine: Implementation, model: str | None, draft: str | None, config: str | None, dtype: str, seed: int
) -> LLM | Audited:
    given = speculative(config)
    if engine is Implementation.FORETOKEN:
        from foretoken import LLM

        return LLM(model=model, draft_model=draft, speculative_config=given, dtype=dtype, seed=seed)
    from foretoken import zoo
    from foretoken.audit.assisted import Assisted
    from foretoken.speculation import SpeculativeConfig, with_draft

    speculation = SpeculativeConfig.of(given)
    if model is None and draft is None and speculation.model is None and speculation.method in (None, "draft_model"):
        draft = str(zoo.path("draft"))
    return Assisted(model or zoo.path("target"), with_draft(speculation, draft), dtype)


def _show(result: Audit, out: Console) -> None:
    """Prints the subject, a line for each check, and the verdict."""
    from rich.text import Text

    facts = (f"{key} {value}" for key, value in result.subject.items() if _short(value))
    out.print(Text(", ".join(facts), style="dim"), soft_wrap=True)
    out.print(_table(result))
    word = str(result.outcome)
    out.print(Text(f"{word.upper()} in {result.seconds:.0f} s: {result.summary}", style=STYLES[word]), soft_wrap=True)


def _short(value: object) -> bool:
    """Returns whether a fact fits into a line. Plans and counts are in the record."""
    return value is not None and not isinstance(value, dict)


def _table(result: Audit) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("check", "verdict", "evidence"):
        table.add_column(head, no_wrap=head != "evidence", overflow="fold")
    table.add_column("s", justify="right")
    for check in result.checks:
        word = str(check.outcome)
        mark = Text(f"{MARKS[word]} {word}", style=STYLES[word])
        table.add_row(Text(check.name), mark, Text(check.evidence), f"{check.seconds:.0f}")
    return table
