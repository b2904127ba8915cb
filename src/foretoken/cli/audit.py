"""``foretoken audit``: tests whether a pair is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from foretoken.bench.workloads import prompts_or_functions
from foretoken.cli.audit_endpoint import AuditServerOptions, audit_engine, audit_server
from foretoken.cli.audit_options import AuditOptions, duration
from foretoken.cli.files import journal
from foretoken.cli.grouped import ALONE, given_options, grouped, option, refuse_options
from foretoken.cli.options import ModelOptions, PositionalModelOptions, ReportOptions
from foretoken.cli.theme import ColorMode, staged, wide_console
from foretoken.core.checks import number
from foretoken.core.errors import InvalidRequest
from foretoken.models.options import check_dtype

if TYPE_CHECKING:
    from rich.console import Console

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
    from foretoken.report.audit import page

    record = result.to_dict()
    report.publish(record, lambda: _parts(result), lambda: page(record))
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
    from foretoken.audit.assisted import Assisted, check_assisted

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
