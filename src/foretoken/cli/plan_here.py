"""``foretoken plan`` for Foretoken's own engine, measured on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.options import ReportOptions, speculative
from foretoken.cli.plan_options import CandidateOptions, PrecisionOptions, SampleOptions
from foretoken.cli.theme import staged, wide_console
from foretoken.core.errors import InvalidRequest
from foretoken.models.options import drafts_format

if TYPE_CHECKING:
    from foretoken.core.progress import Say
    from foretoken.models.base import Model
    from foretoken.plan.candidates import Candidate
    from foretoken.plan.outcome import Plan

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
    from foretoken.plan.render import rendered
    from foretoken.plan.simulation.remote_drafting import check_rtt, remote_drafting
    from foretoken.report.plan import page

    check_rtt(rtt, sample.batch or (1,))
    target, drafts, heads = candidates.models(_ROLES)
    configs = [*shipped(target), *map(speculative, candidates.speculative_config or ())]
    chosen, texts = candidates_of(drafts, heads, configs), sample.texts()
    with staged(wide_console(report.color, stderr=True)) as say:
        result = _plan(target, chosen, texts, sample, precision, say)
    if rtt is not None:
        result = replace(result, remote_drafting=remote_drafting(result.rows, rtt / 1e3))

    record = result.to_dict()
    report.publish(record, lambda: rendered(result), lambda: page(record), result.setting)


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

    from foretoken.bench.setting import cores, setting
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


def _passes(path: Path, model: Any, quantization: str, weight_format: str) -> list[dict[str, Any]]:
    """The measured curve of a model that is loaded, from the cache where it is known; empty where memory is short."""
    from foretoken.bench.costs import Loaded, measured
    from foretoken.models.formats.checkpoint import load_config

    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    loaded = Loaded(path, model, load_config(path), size, quantization, weight_format)
    return measured(loaded).to_dict() if loaded.fits_twice else []
