"""``foretoken plan``: predicts the speedup of speculation on this machine and text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.files import check_alone, check_places, check_served, json_object, publish, write_text
from foretoken.cli.options import (
    ApiKey,
    Baseline,
    BaselineKey,
    Color,
    Html,
    Json,
    KVCacheDtype,
    Output,
    Quantization,
    Retries,
    ServerName,
    Timeout,
    WeightFormat,
)
from foretoken.cli.theme import ColorMode, staged, wide_console
from foretoken.models.options import check_dtype, check_kv_cache_dtype, check_quantization, check_weight_format

if TYPE_CHECKING:
    from foretoken.plan.outcome import Plan
    from foretoken.plan.planner import PlanSettings, Say

_ROLES = ("eagle3", "medusa", "blockwise")
_VLLM_ROLES = ("eagle3", "medusa")
_TURNS = 24


def plan(
    model: Annotated[str | None, typer.Option(help="Target model. [the bundled one, with its draft and heads]")] = None,
    draft_model: Annotated[list[str] | None, typer.Option(help="A draft model (repeatable).")] = None,
    heads: Annotated[list[str] | None, typer.Option(help="EAGLE, Medusa or blockwise heads (repeatable).")] = None,
    speculative_config: Annotated[
        list[str] | None, typer.Option(metavar="JSON", help="Another way to speculate (repeatable).")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines with a "prompt" each, and the target\'s "completion" if known. [our functions]'),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts to take from the start.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens for each prompt.")] = 64,
    temperature: Annotated[list[float] | None, typer.Option(min=0.0, help="Repeatable. [0 and 1]")] = None,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once (repeatable). [1]")] = None,
    turns: Annotated[int, typer.Option(min=3, help="Timed steps of every candidate.")] = _TURNS,
    quantization: Quantization = None,
    weight_format: WeightFormat = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    as_json: Json = False,
    output: Output = None,
    html_file: Html = None,
    color: Color = ColorMode.AUTO,
    engine: Annotated[str, typer.Option(help="foretoken; vllm: measured on vLLM itself, for use there.")] = "foretoken",
    engine_python: Annotated[Path | None, typer.Option(help="Python of vLLM's environment. [make peers]")] = None,
    engine_args: Annotated[
        str | None, typer.Option(metavar="JSON", help="Arguments of vllm.LLM: '{\"tensor_parallel_size\": 2}'.")
    ] = None,
    engine_alone: Annotated[
        bool, typer.Option("--engine-alone", help="One vLLM at a time, where the memory does not hold two.")
    ] = False,
    rtt: Annotated[
        float | None, typer.Option(metavar="MS", help="What would drafting on a machine so far away gain? Simulated.")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Plan for this OpenAI-compatible server; --model is its name for the model."),
    ] = None,
    baseline: Baseline = None,
    server: ServerName = "auto",
    api_key: ApiKey = None,
    baseline_api_key: BaselineKey = None,
    depth: Annotated[int | None, typer.Option(min=1, help="The endpoint's draft length. [as it says]")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests to the endpoint at once (repeatable). [1, 4, 16]")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="The endpoint's model here, to foretell --draft-model and --heads.")
    ] = None,
    earlier: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="FILE", help="Record of the endpoint's plan at another draft length."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="To spend on the endpoint: a time such as 5m, or tokens such as 60ktokens.")
    ] = None,
    timeout: Timeout = 120.0,
    retries: Retries = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what measuring the endpoint costs.")] = False,
) -> None:
    """Predict tokens per step and speedup of every way to speculate, and recommend one, or none.

    The target writes a sample after the prompts; every candidate is evaluated on it, and steps are timed here. With
    --endpoint, of any OpenAI-compatible server, from outside; exit code 3 says that nothing can be told, and why.
    """
    check_places(output=output, html=html_file)
    if endpoint is not None:
        check_served(
            {
                "--top-p": top_p != 1.0,
                "--batch": bool(batch),
                "--turns": turns != _TURNS,
                "--quantization": quantization is not None,
                "--weight-format": weight_format != "auto",
                "--kv-cache-dtype": kv_cache_dtype != "auto",
                "--dtype": dtype != "auto",
                "--engine": engine != "foretoken",
                "--engine-python": engine_python is not None,
                "--engine-args": engine_args is not None,
                "--engine-alone": engine_alone,
                "--rtt": rtt is not None,
            }
        )
        from foretoken.cli.plan_endpoint import PlanEndpointOptions, plan_for_endpoint

        given = PlanEndpointOptions(
            url=endpoint,
            model=model,
            baseline=baseline,
            server=server,
            api_key=api_key,
            baseline_api_key=baseline_api_key,
            depth=depth,
            temperatures=temperature or (),
            concurrency=concurrency or (1, 4, 16),
            max_tokens=max_tokens,
            budget=budget,
            configs=[json_object("--speculative-config", text) for text in speculative_config or []],
            checkpoint=checkpoint,
            drafts=draft_model or (),
            heads=heads or (),
            earlier=earlier or (),
            timeout=timeout,
            retries=retries,
            dry_run=dry_run,
            prompts=prompts,
            count=count,
            output=output,
        )
        raise typer.Exit(plan_for_endpoint(given, as_json, html_file, color))
    check_alone(
        {
            "--baseline": baseline,
            "--depth": depth,
            "--concurrency": concurrency,
            "--checkpoint": checkpoint,
            "--with": earlier,
            "--budget": budget,
            "--dry-run": dry_run,
        }
    )
    check_dtype(dtype)
    check_quantization(quantization)
    check_weight_format(weight_format)
    check_kv_cache_dtype(kv_cache_dtype)
    if engine != "foretoken" or engine_python or engine_args or engine_alone:
        from foretoken.cli.plan_vllm import Options, plan_for
        from foretoken.core.errors import InvalidRequest

        if rtt is not None:
            raise InvalidRequest("--rtt is answered for foretoken's own engine; leave it or --engine out")
        for option, value in (("--weight-format", weight_format), ("--kv-cache-dtype", kv_cache_dtype)):
            if value != "auto":
                raise InvalidRequest(f"{option} belongs to foretoken's own runtime; leave it or --engine out")
        own = Options(
            engine,
            engine_python,
            engine_args,
            engine_alone,
            tuple(dict.fromkeys(temperature or (0.0, 1.0))),
            tuple(dict.fromkeys(batch or (1,))),
            max_tokens,
            top_p,
            dtype,
            quantization,
        )
        named = _models(model, draft_model or [], heads or [], _VLLM_ROLES)
        plan_for(own, named, speculative_config or [], (prompts, count), (as_json, output, html_file), color)
        return
    from foretoken.cli.generate import speculative
    from foretoken.plan.candidates import candidates, shipped
    from foretoken.plan.planner import PlanSettings
    from foretoken.plan.render import rendered
    from foretoken.plan.simulation.remote_drafting import check_rtt, remote_drafting

    check_rtt(rtt, batch or (1,))
    settings = PlanSettings(
        temperatures=tuple(dict.fromkeys(temperature or (0.0, 1.0))),
        batches=tuple(dict.fromkeys(batch or (1,))),
        max_tokens=max_tokens,
        turns=turns,
        top_p=top_p,
    )
    target, drafts, found_heads = _models(model, draft_model or [], heads or [])
    configs = [*shipped(target), *(speculative(text) or {} for text in speculative_config or [])]
    chosen = candidates(drafts, found_heads, configs)
    notes, console = wide_console(color, stderr=True), wide_console(color)
    with staged(notes) as say:
        result = _plan(
            target, chosen, prompts, count, settings, (dtype, quantization, weight_format, kv_cache_dtype), say
        )
    if rtt is not None:
        result = replace(result, remote_drafting=remote_drafting(result.rows, rtt / 1e3))

    def show() -> None:
        for part in rendered(result):
            console.print(part, soft_wrap=not hasattr(part, "columns"))
        console.print(", ".join(f"{key} {value}" for key, value in result.setting.items()), style="dim", markup=False)

    record = result.to_dict()
    publish(record, show, as_json, output)
    if html_file is not None:
        from foretoken.report.plan import page

        write_text(html_file, page(record))


def _models(
    model: str | None, drafts: list[str], heads: list[str], bundled: Sequence[str] = _ROLES
) -> tuple[str, list[str], list[str]]:
    """Returns the given models, or the bundled ones."""
    from foretoken import zoo

    if model is not None:
        return model, drafts, heads
    roles = {each.role for each in zoo.list_models()}
    result = [str(zoo.path(role)) for role in bundled if role in roles]
    return str(zoo.path("target")), drafts or [str(zoo.path("draft"))], heads or result


def _plan(
    model: str,
    chosen: Sequence[Any],
    prompts: Path | None,
    count: int,
    settings: PlanSettings,
    options: tuple[str, str | None, str, str],
    say: Say,
) -> Plan:
    """Makes a plan, with the setting and the costs of passes."""
    from functools import cache

    import torch

    from foretoken.bench.setting import cores, setting
    from foretoken.bench.workloads import FUNCTIONS, load_prompts
    from foretoken.engine.prompts import PromptTokenizer
    from foretoken.llm import eos_ids, start_ids
    from foretoken.models.base import Model
    from foretoken.models.formats.checkpoint import load_tokenizer, resolve
    from foretoken.models.loading import load_model
    from foretoken.models.options import drafts_format
    from foretoken.plan.planner import Planner
    from foretoken.speculation import Builder

    dtype, quantization, weight_format, kv_cache_dtype = options
    torch.set_num_threads(cores())
    say("loading the models", 0.0)
    path = resolve(model)
    tokenizer = load_tokenizer(path)
    texts = load_prompts(prompts, count) if prompts is not None else list(FUNCTIONS)[:count]
    target = load_model(
        path, dtype=dtype, quantization=quantization, weight_format=weight_format, kv_cache_dtype=kv_cache_dtype
    )
    start = start_ids(path, target.vocab_size) if target.takes_source else ()
    reader = PromptTokenizer(tokenizer, target.vocab_size, start)
    read = [reader.tokenize(text) for text in texts]
    written = _completions(prompts, len(read), tokenizer)

    @cache  # candidates with the same draft share its weights
    def load(other: str | Path) -> Model:
        return load_model(resolve(other), dtype=dtype, weight_format=drafts_format(weight_format))

    build = Builder(target, tokenizer, path, load).build
    planner = Planner(target, build, settings, eos_ids(path, tokenizer, target.vocab_size), say)
    result = planner.plan(read, chosen, written)
    say("passes by rows", 1.0)
    where = prompts.name if prompts is not None else "our own functions"
    drafts = {str(c.config["model"]): None for c in chosen if c.method == "draft_model" and c.config.get("model")}
    own = [(path, target, quantization or "", weight_format)]
    loaded = [*own, *((resolve(draft), load(resolve(draft)), "", drafts_format(weight_format)) for draft in drafts)]
    return replace(
        result,
        setting=setting() | {"target": path.name, "max_tokens": settings.max_tokens},
        prompts=f"{len(read)} of {where}",
        costs={folder.name: _passes(folder, held, quantized, form) for folder, held, quantized, form in loaded},
    )


def _completions(prompts: Path | None, count: int, tokenizer: Any) -> list[list[int]] | None:
    """Returns completions of the first ``count`` lines, or None. Raises InvalidRequest if only some have one."""
    from foretoken.core.errors import InvalidRequest

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
    from foretoken.bench.costs import Loaded
    from foretoken.models.formats.checkpoint import load_config
    from foretoken.plan.costs import has_room, measured

    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    loaded = Loaded(path, model, load_config(path), size, quantization, weight_format)
    return measured(loaded).to_dict() if has_room(loaded) else []
