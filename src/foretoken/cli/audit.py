"""``foretoken audit``: tests whether speculation is exact, in this process, of a server, or of another engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from foretoken.bench.workloads import prompts_or_functions
from foretoken.cli.files import journal
from foretoken.cli.grouped import ALONE, given_options, grouped, option, refuse_options
from foretoken.cli.options import (
    Dtype,
    ModelOptions,
    PositionalModelOptions,
    ReportOptions,
    ServerOptions,
    announcing,
    budget,
    duration,
)
from foretoken.cli.theme import ColorMode, staged, waiting, wide_console
from foretoken.core.checks import number
from foretoken.core.errors import InvalidRequest
from foretoken.models.options import check_dtype
from foretoken.propose.methods import NONE

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.audit.endpoint import Endpoint
    from foretoken.audit.subject import Audit, Audited
    from foretoken.llm import LLM


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The texts that are compared."""

    prompts: Path | None = option(None, 'JSON lines with a "prompt" each. [our own functions]', metavar="FILE")
    budget: str = option(
        "2m", "As 90s, 5m or 1h, for an endpoint also as 60ktokens; more finds smaller errors.", metavar="TIME"
    )
    temperature: float = option(1.0, "Of the sampled texts; above 0.")
    seed: int = option(0, "Of all sampling.")
    dtype: Dtype = "auto"
    float32: bool = option(True, "Compare seeded texts in float32 as well.")


@dataclass(frozen=True, kw_only=True)
class AuditServerOptions:
    """The server to audit."""

    endpoint: str | None = option(
        None, "Audit this OpenAI-compatible server; --model is its name for the model.", metavar="URL"
    )
    pair: ServerOptions
    checkpoint: str | None = option(None, "Compute the endpoint's target distribution here, from this model.")
    concurrency: int = option(8, "Requests to the endpoint at a time.", min=1)
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
        journal=journal,
        **arguments,
    )
    return _audited(endpoint, texts, notes, options.dry_run)


def audit_engine(
    engine: str, models: ModelOptions, compared: AuditOptions, checkpoint: str | None, concurrency: int, notes: Console
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


CODES = {"passed": 0, "failed": 1, "inconclusive": 3}
STYLES = {"passed": "green", "failed": "bold red", "inconclusive": "yellow", "skipped": "dim"}
MARKS = {"passed": "✓", "failed": "✗", "inconclusive": "?", "skipped": "-"}


class Implementation(StrEnum):
    """The implementation whose speculation is audited."""

    FORETOKEN = "foretoken"
    TRANSFORMERS = "transformers"
    VLLM = "vllm"
    OPENVINO = "openvino"


@dataclass(frozen=True, kw_only=True)
class AuditReportOptions(ReportOptions):
    """Destinations of the verdicts."""

    color: ColorMode = option(ColorMode.AUTO, "Colours of the verdicts.")


@grouped
def audit(
    models: PositionalModelOptions,
    engine: Implementation = option(
        Implementation.FORETOKEN,
        "Whose speculation; transformers' is audited with its defaults, vllm and openvino from outside.",
    ),
    *,
    compared: AuditOptions,
    server: AuditServerOptions,
    report: AuditReportOptions,
) -> None:
    """Test whether speculation changes the output (greedy, sampled, seeded), and whether the test would notice.

    With --endpoint, of any OpenAI-compatible server, from outside. The answers are kept beside --output until there
    is a verdict, so that an interrupted audit goes on where it stopped.

    Exit code: 0 passed, 1 failed, 3 inconclusive (no error was seen, but the test was too weak to see one).
    """
    notes = wide_console(report.color, stderr=True)
    if server.endpoint is not None:
        result = audit_server(server.endpoint, server, models, compared, journal(report.output), notes)
        if server.dry_run:
            report.write(result.subject)
            return
    elif engine in (Implementation.VLLM, Implementation.OPENVINO):
        apart = ("--checkpoint", "--concurrency")  # an engine is audited like a server
        refuse_options([option for option in given_options(server) if option not in apart], ALONE)
        result = audit_engine(engine, models, compared, server.checkpoint, server.concurrency, notes)
    else:
        refuse_options(given_options(server), ALONE)
        result = _audit_here(engine, models, compared, notes)
    from foretoken.audit.page import page

    report.publish(result.to_dict(), lambda: _parts(result), lambda: page(result))
    raise typer.Exit(CODES[result.outcome])


def _audit_here(engine: Implementation, models: ModelOptions, compared: AuditOptions, notes: Console) -> Audit:
    """Audits speculation in this process. Raises InvalidRequest and ForetokenError."""
    seconds = duration(compared.budget)
    check_dtype(compared.dtype)
    from foretoken.audit.run import MIN_TEMPERATURE
    from foretoken.audit.run import audit as run

    number("temperature", compared.temperature, MIN_TEMPERATURE)
    texts, load = prompts_or_functions(compared.prompts), _loader(engine, models, compared)
    with staged(notes) as watch:
        watch("loading the models", 0.0)
        subject = load()
        return run(
            subject,
            texts,
            budget=seconds,
            temperature=compared.temperature,
            seed=compared.seed,
            float32=compared.float32,
            watch=watch,
            too_short=partial(_refuse, compared),
        )


def _refuse(compared: AuditOptions, least: float) -> None:
    """Raises InvalidRequest: the smallest audit takes ``least`` seconds."""
    float32 = ", or --no-float32" if compared.float32 else ""
    raise InvalidRequest(
        f"--budget {compared.budget} is too short here: one text for every check takes about {least:.0f} s, and a "
        f"verdict needs more texts; give a larger budget{float32}"
    )


def _loader(
    engine: Implementation, models: ModelOptions, compared: AuditOptions
) -> Callable[[], LLM] | Callable[[], Audited]:
    """Returns a function that loads the models. Raises InvalidRequest for options that contradict each other."""
    if engine is Implementation.FORETOKEN:
        from foretoken import LLM

        return partial(
            LLM,
            model=models.model,
            draft_model=models.draft_model,
            speculative_config=models.config,
            dtype=compared.dtype,
            seed=compared.seed,
        )
    from foretoken.audit.implementations import Assisted, check_assisted

    target, config = models.pair()
    check_assisted(config)
    return partial(Assisted, target, config, compared.dtype)


def _parts(result: Audit) -> Iterator[Text | Table]:
    """Yields the subject, a table with a line for each check, and the verdict."""
    # plans and counts do not fit into a line: they are in the record
    short = {key: value for key, value in result.subject.items() if value is not None and not isinstance(value, dict)}
    yield Text(", ".join(f"{key} {value}" for key, value in short.items()), style="dim")
    yield _table(result)
    word = str(result.outcome)
    yield Text(f"{word.upper()} in {result.seconds:.0f} s: {result.summary}", style=STYLES[word])


def _table(result: Audit) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("check", "verdict", "evidence"):
        table.add_column(head, no_wrap=head != "evidence", overflow="fold")
    table.add_column("s", justify="right")
    for check in result.checks:
        word = str(check.outcome)
        mark = Text(f"{MARKS[word]} {word}", style=STYLES[word])
        table.add_row(Text(check.name), mark, Text(check.evidence), f"{check.seconds:.0f}")
    return table
