"""``foretoken plan``: predicts the speedup of speculation, on this machine, on a server, or on vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretoken import zoo
from foretoken.cli.files import journal, json_object
from foretoken.cli.grouped import ALONE, SERVED, given_options, grouped, option, refuse_options
from foretoken.cli.options import MaxModelLen, ReportOptions, ServerOptions, announcing, budget
from foretoken.cli.plan_here import CandidateOptions, PrecisionOptions, SampleOptions, plan_here, print_memory
from foretoken.cli.theme import note, staged, wide_console
from foretoken.core.errors import ForetokenError, InvalidRequest

if TYPE_CHECKING:
    from foretoken.plan.endpoint import PlannedEndpoint
    from foretoken.plan.vllm import Bench, VllmCandidate


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
            pair=ServerPair(url, candidates.model, **arguments),
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
    from foretoken.plan.endpoint.outcome import rendered, verdict_lines
    from foretoken.plan.page import endpoint_page

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
    report.publish(record, lambda: rendered(result), lambda: endpoint_page(result), facts)
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
    from foretoken.cli.checkpoints import convert
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
    from foretoken.bench.output import setting
    from foretoken.models.formats.checkpoint import load_tokenizer, resolve
    from foretoken.plan.outcome import rendered
    from foretoken.plan.page import page
    from foretoken.plan.vllm import answers, record, vllm_plan

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
    report.publish(
        whole, lambda: rendered(result, pastes), lambda: page(result, whole["exports"] or {}, conditional=True), facts
    )


@grouped
def plan(
    candidates: CandidateOptions,
    sample: SampleOptions,
    precision: PrecisionOptions,
    report: ReportOptions,
    engine: PlanEngineOptions,
    rtt: float | None = option(None, "What would drafting on a machine so far away gain? Simulated.", metavar="MS"),
    max_model_len: MaxModelLen = None,
    *,
    server: PlanServerOptions,
) -> None:
    """Predict tokens per step and speedup of every way to speculate, and recommend one, or none.

    The target writes a sample after the prompts; every candidate is evaluated on it, and steps are timed here. With
    --endpoint, of any OpenAI-compatible server, from outside; exit code 3: no plan is possible, with the reason. With
    --dry-run alone, the memory of target and drafter, which are not loaded; exit code 3: they do not fit.
    """
    if server.endpoint is not None:
        given = given_options(precision, engine)
        given += [option for option in given_options(sample) if option in ("--top-p", "--batch", "--turns")]
        refuse_options(given + (["--rtt"] if rtt is not None else []), SERVED)
        raise typer.Exit(plan_for_endpoint(server.endpoint, server, candidates, sample, report))
    refuse_options([option for option in given_options(server) if option != "--dry-run"], ALONE)
    precision.check()
    if server.dry_run:
        raise typer.Exit(print_memory(candidates, precision, max_model_len, report))
    if max_model_len is not None:
        raise InvalidRequest("--max-model-len belongs to --dry-run; leave it out")
    if not given_options(engine):
        plan_here(candidates, sample, precision, rtt, report)
        return
    if rtt is not None:
        raise InvalidRequest("--rtt is answered for foretoken's own engine; leave it or --engine out")
    plan_for_vllm(engine, candidates, sample, precision, report)
