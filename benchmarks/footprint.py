"""Predicted over measured peak memory of ``foretoken plan --dry-run``, for models, drafters and limits.

    python benchmarks/footprint.py --output footprint.json

Every case is a fresh process. It imports everything and runs the bundled draft first; memory is the highest resident
memory after that, less what was resident before. Prompts fill the KV cache that the prediction counts: one sequence of
at most 2,048 tokens or of ``max_model_len``, or as many as ``kv_cache_memory_bytes`` holds.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer

from foretoken.bench.measure import fresh_process
from foretoken.bench.output import listing, progress, report
from foretoken.engine.footprint import MemoryOptions, plan_memory
from foretoken.speculation import SpeculativeConfig, with_method
from options import Config, Output, model_path, target_path, with_models
from real_models import REAL_MODELS

NONE, DRAFT = {"method": "none"}, {"method": "draft_model", "model": "draft"}
HEADS = {"eagle3", "medusa", "mtp"}
MIB = 2**20


class Case(NamedTuple):
    """A model, the way to speculate, and arguments of ``LLM`` that limit or change its memory."""

    model: str
    config: Config
    options: Mapping[str, Any] = MappingProxyType({})


CASES = (
    Case("wide", NONE, {"max_model_len": 8192}),
    Case("wide", {"method": "ngram"}, {"quantization": "int8", "max_model_len": 8192, "kv_cache_dtype": "int8"}),
    Case("bundled", {"method": "eagle3"}, {"dtype": "bfloat16"}),
    Case("bundled", {"method": "medusa"}, {"kv_cache_dtype": "int8"}),
    Case("wide", NONE),
    Case("wide", DRAFT, {"quantization": "int8"}),
    Case("wide", {"method": "suffix"}, {"quantization": "int4"}),
    Case("wide", {"method": "self_quantized"}),
    Case("wide", {"method": "self_quantized"}, {"quantization": "int8", "kv_cache_dtype": "int8"}),
    Case("wide", DRAFT, {"kv_cache_memory_bytes": 512 * MIB}),
    Case("wide", NONE, {"weight_format": "raw"}),
    Case("smollm2", NONE),
    Case("smollm2", {}),
    Case("smollm2", {}, {"max_model_len": 8192}),
    Case("smollm2", {"method": "recycling"}, {"max_model_len": 8192, "kv_cache_dtype": "int8"}),
    Case("smollm2", {}, {"kv_cache_memory_bytes": 640 * MIB}),
    Case("gemma3", {"method": "vocabulary", "model": "smollm2"}),
    Case("gemma3", NONE),
    Case("gemma3", {"method": "ngram"}, {"max_model_len": 8192}),
    Case("gemma3", {"method": "suffix"}, {"kv_cache_dtype": "int8", "max_model_len": 4096}),
)
COLUMNS = {
    "model": "{model}",
    "drafter": "{drafter}",
    "limit": "{limit}",
    "sequences": "{sequences}",
    "predicted": "{predicted:.0f} MiB",
    "measured": "{measured:.0f} MiB",
    "ratio": "{ratio:.2f}",
}
_PROGRAM = """
import gc, json, sys
from pathlib import Path
from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.output import memory

path, config, options, tokens = sys.argv[1], *map(json.loads, sys.argv[2:])
params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
usual = {key: options[key] for key in ("dtype", "kv_cache_dtype", "quantization") if key in options}
LLM(zoo.path("draft"), speculative_config={"method": "none"}, **usual).generate("x", params)
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
before = memory("VmRSS")
llm = LLM(path, speculative_config=config, **options)
length = min(tokens, options.get("max_model_len", 2048), llm.target.max_length) - 16
prompts = [[5 + (i + at) % 300 for i in range(length)] for at in range(max(1, tokens // (length + 16)))]
llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
print(json.dumps({"measured": memory("VmHWM") - before, "sequences": len(prompts)}))
"""


def path_of(name: str) -> Path:
    """Returns the path of a case's model."""
    return target_path(None, small=name == "bundled") if name in ("bundled", "wide") else model_path(name)


def configured(case: Case) -> tuple[Path, Config]:
    """Returns the paths of a case's model, and its configuration with those of its drafters."""
    path, config = path_of(case.model), case.config
    if config.get("model") in REAL_MODELS:
        return path, config | {"model": str(model_path(config["model"]))}
    return path, with_models(config, heads=HEADS) if config else config


def measure(case: Case) -> Mapping[str, Any]:
    """Returns the predicted and the measured bytes of a case."""
    path, config = configured(case)
    plan = plan_memory(path, with_method(SpeculativeConfig.of(config)), MemoryOptions(**case.options))
    tokens = plan.tokens or plan.kv_bytes // sum(model.kv_per_token for model in plan.models)
    arguments = [str(path), json.dumps(config), json.dumps(dict(case.options)), str(tokens)]
    _, result = fresh_process(_PROGRAM, arguments)
    limit = ", ".join(f"{key}={value}" for key, value in case.options.items())
    names = {"model": case.model, "drafter": case.config.get("method", "default"), "limit": limit}
    measured = {"predicted": plan.total / MIB, "measured": result["measured"] / MIB}
    ratio = plan.total / result["measured"]
    return names | measured | {"ratio": ratio, "sequences": result["sequences"], "plan": plan.describe()}


def main(
    only: Annotated[list[int] | None, typer.Option("--case", help="Number of a case; may be repeated. [all]")] = None,
    output: Output = None,
) -> None:
    """Prints the predicted and the measured peak memory of every case."""
    chosen = CASES if only is None else [CASES[number] for number in only]
    cases = [measure(case) for case in progress(chosen, "cases")]
    ratios = [case["ratio"] for case in cases]
    said = f"predicted over measured: {min(ratios):.2f} to {max(ratios):.2f}"
    report([listing(COLUMNS, cases), said], {}, output, cases=cases)


if __name__ == "__main__":
    typer.run(main)
