"""``foretoken plan`` for this machine: options of all plans, measured speedups, and memory (``--dry-run``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from foretoken import zoo
from foretoken.bench.workloads import prompts_or_functions
from foretoken.cli.files import json_object
from foretoken.cli.grouped import option
from foretoken.cli.options import DRAFT_MODEL, Dtype, PositionalTarget, ReportOptions, TargetFormats, TopP, speculative
from foretoken.cli.theme import staged, wide_console
from foretoken.core.errors import InvalidRequest
from foretoken.models.options import drafts_format

if TYPE_CHECKING:
    from foretoken.core.progress import Say
    from foretoken.costs.measured import PassCost
    from foretoken.engine.footprint import MemoryPlan
    from foretoken.models.base import Model
    from foretoken.plan.candidates import Candidate
    from foretoken.plan.outcome import Plan


@dataclass(frozen=True, kw_only=True)
class CandidateOptions(PositionalTarget):
    """The target, and the ways to speculate."""

    draft_model: list[str] | None = option(
        None, "A draft model (repeatable). [that of the bundled target]", *DRAFT_MODEL
    )
    heads: list[str] | None = option(None, "EAGLE, Medusa or blockwise heads (repeatable). [likewise]")
    speculative_config: list[str] | None = option(None, "Another way to speculate (repeatable).", metavar="JSON")

    def models(self, bundled: Sequence[str]) -> tuple[str, Sequence[str], Sequence[str]]:
        """Returns target, drafts and heads: those given, or the bundled ones with heads of the roles ``bundled``."""
        drafts, heads = self.draft_model or [], self.heads or []
        if self.model is not None:
            return self.model, drafts, heads
        roles = {each.role for each in zoo.list_models()}
        result = [str(zoo.path(role)) for role in bundled if role in roles]
        return str(zoo.path("target")), drafts or [str(zoo.path("draft"))], heads or result

    @property
    def configs(self) -> list[dict[str, Any]]:
        """Further ways to speculate. Raises InvalidRequest."""
        return [json_object("--speculative-config", text) for text in self.speculative_config or []]


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The texts that the target writes, and how often steps are timed."""

    prompts: Path | None = option(
        None, 'JSON lines with a "prompt" each, and the target\'s "completion" if known. [our functions]'
    )
    count: int = option(16, "Prompts to take from the start.", min=1)
    max_tokens: int = option(64, "Tokens for each prompt.", min=8)
    temperature: list[float] | None = option(None, "Repeatable. [0 and 1]", min=0.0)
    top_p: TopP = 1.0
    batch: list[int] | None = option(None, "Sequences at once (repeatable). [1]", min=1)
    turns: int = option(24, "Timed steps of every candidate.", min=3)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """All temperatures, each once."""
        return tuple(dict.fromkeys(self.temperature or (0.0, 1.0)))

    @property
    def batches(self) -> tuple[int, ...]:
        """All numbers of sequences at once, each once."""
        return tuple(dict.fromkeys(self.batch or (1,)))

    def texts(self) -> list[str]:
        """Returns the prompts. Raises InvalidRequest."""
        return prompts_or_functions(self.prompts, self.count)

    def source(self, number: int) -> str:
        return f"{number} of {self.prompts.name if self.prompts is not None else 'our own functions'}"


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(TargetFormats):
    """Formats of the target's weights, KV cache and activations."""

    dtype: Dtype = "auto"


_ROLES = ("eagle3", "mtp", "medusa", "blockwise")  # of the bundled heads


def plan_here(
    candidates: CandidateOptions,
    sample: SampleOptions,
    precision: PrecisionOptions,
    rtt: float | None,
    report: ReportOptions,
) -> None:
    """Measures, predicts and prints. rtt: milliseconds to another machine that could draft. Raises InvalidRequest."""
    from foretoken.plan.candidates import candidates as candidates_of
    from foretoken.plan.candidates import shipped
    from foretoken.plan.outcome import rendered
    from foretoken.plan.page import page
    from foretoken.plan.simulator import check_rtt, remote_drafting

    check_rtt(rtt, sample.batch or (1,))
    target, drafts, heads = candidates.models(_ROLES)
    configs = [*shipped(target), *map(speculative, candidates.speculative_config or ())]
    chosen, texts = candidates_of(drafts, heads, configs), sample.texts()
    with staged(wide_console(report.color, stderr=True)) as say:
        result = _plan(target, chosen, texts, sample, precision, say)
    if rtt is not None:
        result = replace(result, remote_drafting=remote_drafting(result.rows, rtt / 1e3))

    record = result.to_dict()
    report.publish(record, lambda: rendered(result), lambda: page(result, record["exports"] or {}), result.setting)


def _plan(
    model: str,
    chosen: Sequence[Candidate],
    texts: Sequence[str],
    sample: SampleOptions,
    precision: PrecisionOptions,
    say: Say,
) -> Plan:
    """Makes a plan, with the setting and the costs of passes."""
    import torch

    from foretoken.bench.output import cores, setting
    from foretoken.engine.prompts import PromptTokenizer
    from foretoken.models.formats.checkpoint import eos_ids, load_tokenizer, resolve, start_ids
    from foretoken.models.loading import load_model
    from foretoken.plan.planner import Planner, PlanSettings
    from foretoken.speculation import Builder

    settings = PlanSettings(
        temperatures=sample.temperatures,
        batches=sample.batches,
        max_tokens=sample.max_tokens,
        turns=sample.turns,
        top_p=sample.top_p,
    )
    torch.set_num_threads(cores())
    say("loading the models", 0.0)
    path = resolve(model)
    tokenizer = load_tokenizer(path)
    target = load_model(path, **vars(precision))
    start = start_ids(path, target.vocab_size) if target.takes_source else ()
    reader = PromptTokenizer(tokenizer, target.vocab_size, start)
    read = [reader.tokenize(text) for text in texts]
    written = _completions(sample.prompts, len(read), tokenizer)
    draft_format = drafts_format(precision.weight_format)

    @cache  # candidates with the same draft share its weights
    def load(other: str | Path, weight_format: str = draft_format, **options: Any) -> Model:
        return load_model(resolve(other), dtype=precision.dtype, weight_format=weight_format, **options)

    build = Builder(target, tokenizer, path, load).build
    planner = Planner(target, build, settings, eos_ids(path, tokenizer, target.vocab_size), say)
    result = planner.plan(read, chosen, written)
    say("passes by rows", 1.0)
    costs = {path.name: _passes(path, target, precision.quantization or "", precision.weight_format)}
    for draft in {c.config["model"]: None for c in chosen if c.method == "draft_model" and c.config.get("model")}:
        folder = resolve(str(draft))
        costs[folder.name] = _passes(folder, load(folder), "", draft_format)
    return replace(
        result,
        setting=setting() | {"target": path.name, "max_tokens": settings.max_tokens},
        prompts=sample.source(len(read)),
        costs=costs,
    )


def _completions(prompts: Path | None, count: int, tokenizer: Any) -> list[list[int]] | None:
    """Returns completions of the first ``count`` lines, or None. Raises InvalidRequest if only some have one."""
    if prompts is None:
        return None
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()][:count]
    given = [line["completion"] for line in lines if "completion" in line]
    if not given:
        return None
    if len(given) < len(lines) or not all(isinstance(text, str) and text for text in given):
        raise InvalidRequest(f'{prompts}: give a "completion", a text, in every line or in none')
    return [list(tokenizer.encode(text, add_special_tokens=False)) for text in given]


def _passes(path: Path, model: Any, quantization: str, weight_format: str) -> Sequence[PassCost]:
    """The measured curve of a model that is loaded, from the cache where it is known; empty where memory is short."""
    from foretoken.bench.costs import Loaded, measured
    from foretoken.models.formats.checkpoint import load_config

    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    loaded = Loaded(path, model, load_config(path), size, quantization, weight_format)
    return measured(loaded).passes if loaded.fits_twice else ()


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
