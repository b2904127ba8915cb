"""``foretoken plan --engine vllm``: a plan for vLLM, measured on vLLM in its own environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken import zoo
from foretoken.cli.files import json_object
from foretoken.cli.grouped import option
from foretoken.cli.options import ReportOptions
from foretoken.cli.plan_options import CandidateOptions, PrecisionOptions, SampleOptions
from foretoken.cli.theme import note, staged, wide_console
from foretoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    from foretoken.plan.vllm import Bench, VllmCandidate

_ROLES = ("eagle3", "medusa")  # of the bundled heads that vLLM loads
OURS = "foretoken.interop_vllm.VllmProposer"
_FREE: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("ngram", {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}, {}),
    ("suffix, recycling", {"method": "custom_class", "model": OURS}, {"foretoken": {"method": "mixture"}}),
)


def lanes(
    target: Path, drafts: Sequence[str], heads: Sequence[str], configs: Sequence[Mapping[str, Any]]
) -> list[VllmCandidate]:
    """Returns the candidates: drafts, heads in vLLM's format, methods without a model, and ``configs`` of vLLM.

    A configuration may hold "additional_config" beside vLLM's keys. Raises InvalidRequest or ModelLoadError.
    """
    from foretoken.models.formats.checkpoint import resolve
    from foretoken.plan.vllm import VllmCandidate

    result = [VllmCandidate.of({"method": "draft_model", "model": str(resolve(draft))}) for draft in drafts]
    result += [_head(resolve(head), target) for head in heads]
    result += [VllmCandidate.of(config, name, additional) for name, config, additional in _FREE]
    for given in configs:
        own = dict(given)
        additional = own.pop("additional_config", {})
        details = [json.dumps(value) for value in additional.values()]
        result.append(
            VllmCandidate.of(own, " ".join([str(own.get("method")), str(own.get("model", "")), *details]), additional)
        )
    if len({lane.name for lane in result}) < len(result):
        raise InvalidRequest("two of the ways to speculate are the same; leave one of them out")
    return result


def _head(folder: Path, target: Path) -> VllmCandidate:
    """Returns a head, written once into the cache for vLLM. Raises InvalidRequest for heads that vLLM does not load."""
    from foretoken.cli.convert import convert
    from foretoken.models.formats.checkpoint import load_config
    from foretoken.models.heads.block import read_block
    from foretoken.plan.candidates import CHAIN, head_method
    from foretoken.plan.vllm import VllmCandidate

    method = head_method(folder)
    method = "dflash" if method == "jetspec" else method  # vLLM reads the order of rows from is_causal
    blocks = method in ("dflash", "dspark")
    if not blocks and method not in ("eagle3", "eagle", "medusa"):
        raise InvalidRequest(f"{folder} holds {method} heads, which vLLM does not load; leave them out")
    out = zoo.cache_folder() / "vllm" / f"{folder.name}-for-{target.name}"
    with redirect_stdout(sys.stderr):
        convert(folder, out, to="vllm", target=str(target), force=True)
    # one head, or one row of a block, per position bounds the draft length
    heads = load_config(out).get("num_heads") if method == "medusa" else None
    depth = read_block(out).depth if blocks else heads or CHAIN[-1]
    return VllmCandidate.of({"method": method, "model": str(out)}, f"{method} {folder.name}", max_depth=depth)


@dataclass(frozen=True, kw_only=True)
class PlanEngineOptions:
    """The engine to plan for."""

    engine: str = option("foretoken", "foretoken; vllm: measured on vLLM itself, for use there.")
    engine_python: Path | None = option(None, "Python of vLLM's environment. [make peers]")
    engine_args: str | None = option(None, "Arguments of vllm.LLM: '{\"tensor_parallel_size\": 2}'.", metavar="JSON")
    engine_alone: bool = option(False, "One vLLM at a time, where the memory does not hold two.", "--engine-alone")

    def bench(self, target: Path, sample: SampleOptions, precision: PrecisionOptions) -> Bench:
        """Returns the benchmark on vLLM. Raises InvalidRequest for options that do not apply to it."""
        from foretoken.plan.vllm import Bench

        for name, value in (
            ("--weight-format", precision.weight_format),
            ("--kv-cache-dtype", precision.kv_cache_dtype),
        ):
            if value != "auto":
                raise InvalidRequest(f"{name} belongs to foretoken's own runtime; leave it or --engine out")
        if self.engine != "vllm":
            raise InvalidRequest(f"--engine {self.engine!r}: expected foretoken, or vllm, to which --engine-* belong")
        if precision.quantization is not None or sample.top_p != 1.0:
            raise InvalidRequest(
                "--quantization and --top-p belong to Foretoken's own runtime; give vLLM its quantization in "
                "--engine-args"
            )
        arguments = json_object("--engine-args", self.engine_args) if self.engine_args is not None else {}
        given = {} if precision.dtype == "auto" else {"dtype": precision.dtype}
        return Bench(
            target=str(target),
            temperatures=sample.temperatures,
            batches=sample.batches,
            max_tokens=sample.max_tokens,
            python=self.engine_python,
            engine=given | arguments,
            alone=self.engine_alone,
        )


def plan_for_vllm(
    engine: PlanEngineOptions,
    candidates: CandidateOptions,
    sample: SampleOptions,
    precision: PrecisionOptions,
    report: ReportOptions,
) -> None:
    """Measures, predicts and prints. Raises InvalidRequest and ForetokenError."""
    from foretoken.bench.setting import setting
    from foretoken.models.formats.checkpoint import load_tokenizer, resolve
    from foretoken.plan.render import rendered
    from foretoken.plan.vllm import answers, record, vllm_plan
    from foretoken.report.plan import page

    model, drafts, heads = candidates.models(_ROLES)
    target = resolve(model)
    bench = engine.bench(target, sample, precision)
    bench.command()  # raises before heads are written if vLLM is missing
    chosen = lanes(target, drafts, heads, candidates.configs)
    tokenizer = load_tokenizer(target)
    ids = [list(tokenizer(text, verbose=False)["input_ids"]) for text in sample.texts()]
    notes = wide_console(report.color, stderr=True)

    def refused(lane: VllmCandidate, error: Exception) -> None:
        note(notes, f"{error}; planned without it", "yellow")

    def pastes(best: Mapping[str, Any]) -> list[str]:
        lines = [f"vLLM  speculative_config={json.dumps(best)}"]
        additional = whole["additional_config"]
        return lines + ([f"      additional_config={json.dumps(additional)}"] if additional else [])

    with staged(notes) as say:
        measured = [each.run() for each in answers(bench, chosen, ids, say, refused=refused)]
    facts = setting() | {"engine": "vllm", "target": target.name, "max_tokens": bench.max_tokens}
    result = vllm_plan(chosen, measured, setting=facts, prompts=sample.source(len(ids)))

    whole = record(result, chosen, measured)
    report.publish(whole, lambda: rendered(result, pastes), lambda: page(whole), facts)
