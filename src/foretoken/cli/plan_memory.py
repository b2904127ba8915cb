"""``foretoken plan --dry-run``: the memory of a target and a drafter, from their files alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from foretoken.cli.options import ReportOptions
from foretoken.cli.plan_options import CandidateOptions, PrecisionOptions
from foretoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    from foretoken.engine.footprint import MemoryPlan

DOES_NOT_FIT = 3
_GIB = 2**30


def print_memory(
    candidates: CandidateOptions, precision: PrecisionOptions, max_model_len: int | None, report: ReportOptions
) -> int:
    """Prints the memory plan of the target and of at most one drafter. Returns the exit code: 3 if it does not fit."""
    from foretoken import zoo
    from foretoken.engine.footprint import MemoryOptions, plan_memory
    from foretoken.models.formats.checkpoint import resolve
    from foretoken.speculation import SpeculativeConfig, with_draft, with_method, with_published

    configs = [{"model": model} for model in [*(candidates.draft_model or []), *(candidates.heads or [])]]
    configs += candidates.configs
    if len(configs) > 1:
        raise InvalidRequest(f"--dry-run sums the memory of one drafter, and {len(configs)} are given; name one")
    path = resolve(candidates.model or zoo.path("target"))
    config = SpeculativeConfig.of(configs[0] if configs else None)
    if not configs and candidates.model is None:
        config = with_draft(config, zoo.path("draft"))
    config = with_method(with_published(config, path)[0])
    plan = plan_memory(path, config, MemoryOptions(**vars(precision), max_model_len=max_model_len))
    report.write(plan.describe(), lambda: _parts(plan))
    return 0 if plan.fits else DOES_NOT_FIT


def _parts(plan: MemoryPlan) -> Iterator[Text | Table]:
    table = Table("", "model", "GiB", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.columns[2].justify = "right"
    for model in plan.models:
        table.add_row(f"weights, {model.role}", model.name, f"{model.weights / _GIB:.2f}")
    table.add_row(f"KV caches, {plan.tokens} tokens", "", f"{plan.kv_bytes / _GIB:.2f}")
    table.add_row("passes", "", f"{sum(model.scratch for model in plan.models) / _GIB:.2f}")
    table.add_row("sum", "", f"{plan.total / _GIB:.2f}")
    free = "unknown" if plan.free is None else f"{plan.free / _GIB:.2f}"
    table.add_row("free", f"on {plan.device}", free)
    yield table
    yield Text("It fits." if plan.fits else "It does not fit.")
    if plan.tokens_that_fit is not None:
        yield Text(f"KV caches of {plan.tokens_that_fit:,} tokens fit beside the weights.")
