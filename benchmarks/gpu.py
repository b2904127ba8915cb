"""Everything that is claimed of a GPU, within ten minutes: steps, drafts, temperatures, batches, number formats, calls.

The most important figures come first; parts for which no time is left are listed. Every text is compared with plain
decoding. ``--small`` runs on any device, where calls of the driver are not counted and the figures mean nothing.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from foretoken import LLM, CompletionOutput, SamplingParams
from foretoken.bench.output import figures, report, wide_console
from foretoken.core.devices import wait_for
from foretoken.core.errors import ForetokenError
from foretoken.train.block_heads import DSparkHead
from foretoken.train.config import DSparkTrainConfig
from foretoken.train.frozen_target import FrozenTarget
from options import Config, Draft, Output, Prompts, Small, Target, label, some_prompts, target_path, with_models

PLAIN: Config = {"method": "none"}
DRAFTED: list[Config] = [
    {"method": "draft_model", "model": "draft", "num_speculative_tokens": 7},
    {"method": "draft_model", "model": "draft", "num_speculative_tokens": 24, "tree": "top_k"},
    {"method": "eagle3"},
    {"method": "mtp"},
    {"method": "dspark", "model": "untrained", "num_speculative_tokens": 7},
    {"method": "ngram"},
]
HEADS = ("eagle3", "mtp")
UNTRAINED = "untrained"  # stands for a head with random weights: none is bundled
QUANTIZED = ("int8", "int4")
CALLS = {  # names of the profiler, by their beginnings
    "launches": ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "reads": ("Memcpy DtoH",),
    "copies": ("Memcpy HtoD",),
}


@dataclass(frozen=True)
class Figure:
    """Speed of one configuration."""

    method: str
    numbers: str
    temperature: float
    batch: int
    tokens_per_second: float
    milliseconds: float
    tokens_per_step: float
    equal: int  # texts that equal those of plain decoding, of ``texts``
    texts: int
    calls: dict[str, float]  # calls of the driver in a step, by the names of ``CALLS``; empty without a GPU


@dataclass(frozen=True)
class Work:
    """Prompts and sizes of all measurements, and the end of their time."""

    target: Path
    draft: Path | None
    prompts: Sequence[str]
    tokens: int
    repeats: int
    end: float


def complete(llm: LLM, work: Work, temperature: float, batch: int) -> tuple[list[CompletionOutput], float]:
    """Completes ``batch`` prompts together, each with a seed. Returns the outputs and the seconds."""
    prompts = [work.prompts[i % len(work.prompts)] for i in range(batch)]
    params = [
        SamplingParams(max_tokens=work.tokens, temperature=temperature, seed=i, ignore_eos=True) for i in range(batch)
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wait_for(llm.target.device)
    return [output.outputs[0] for output in outputs], time.perf_counter() - started


def calls_of(llm: LLM, work: Work, temperature: float, batch: int) -> dict[str, float]:
    """Returns the calls of the driver in a step, prefill included; none without a GPU."""
    if llm.target.device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        outputs, _ = complete(llm, work, temperature, batch)
    steps = max(output.stats.steps for output in outputs)
    counts = [(event.key, event.count) for event in profiled.key_averages()]
    return {
        name: round(sum(count for key, count in counts if key.startswith(beginnings)) / steps, 2)
        for name, beginnings in CALLS.items()
    }


def untrained_head(target: Path, folder: Path) -> Path:
    """Writes a gated DSpark head with random weights: its time is that of a trained one, its acceptance is not."""
    frozen = FrozenTarget(target, torch.device("cpu"))
    head = DSparkHead(DSparkTrainConfig(gated=True), frozen, torch.ones(frozen.vocab))
    (folder / "config.json").write_text(json.dumps(head.describe(frozen)))
    save_file(head.tensors(frozen), folder / "model.safetensors")
    return folder


def named(config: Config) -> str:
    return f"{label(config)}, {UNTRAINED}" if config.get("model") == UNTRAINED else label(config)


class Measured:
    """Measurements of one model after another, and the plain texts that all are compared with."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._plain: dict[tuple[str, float], list[tuple[int, ...]]] = {}
        self.figures: list[Figure] = []
        self.missing: dict[str, str] = {}

    def run(self, config: Config, numbers: str, places: Sequence[tuple[float, int]]) -> None:
        """Loads a configuration and measures it at each temperature and batch. Reasons for none are recorded."""
        work, name = self._work, f"{named(config)}, {numbers}"
        if time.monotonic() > work.end:
            self.missing[name] = "no time was left"
            return
        quantization, config = None if numbers == "bf16" else numbers, with_models(config, work.draft, HEADS)
        method = named(config)
        with TemporaryDirectory() as folder:
            if config.get("model") == UNTRAINED:
                config["model"] = str(untrained_head(work.target, Path(folder)))
            try:
                llm = LLM(
                    work.target,
                    dtype="bfloat16",
                    quantization=quantization,
                    speculative_config=config,
                    max_num_seqs=max(batch for _, batch in places),
                )
            except ForetokenError as error:
                self.missing[name] = str(error)
                return
        for temperature, batch in places:
            if time.monotonic() > work.end:
                self.missing[f"{name}, temperature {temperature:g}, batch {batch}"] = "no time was left"
            else:
                self.figures.append(self._figure(llm, method, numbers, temperature, batch))
        del llm
        gc.collect()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()

    def _figure(self, llm: LLM, method: str, numbers: str, temperature: float, batch: int) -> Figure:
        work, runs = self._work, list[float]()
        outputs, _ = complete(llm, work, temperature, batch)  # graphs are captured
        for _ in range(work.repeats):
            outputs, seconds = complete(llm, work, temperature, batch)
            runs.append(seconds)
        texts = [output.token_ids for output in outputs]
        plain = self._plain.setdefault((numbers, temperature), [])
        plain += texts[len(plain) :]
        steps = max(output.stats.steps for output in outputs)
        return Figure(
            method,
            numbers,
            temperature,
            batch,
            sum(map(len, texts)) / median(runs),
            1e3 * median(runs) / steps,
            sum(map(len, texts)) / sum(output.stats.steps for output in outputs),
            sum(one == other for one, other in zip(texts, plain, strict=False)),
            len(texts),
            calls_of(llm, work, temperature, batch),
        )


def raced(work: Work, peers: str) -> Iterator[str]:
    """Runs the race against other engines on the same prompts' length. Yields its lines."""
    seconds = work.end - time.monotonic()
    if peers == "none" or seconds <= 0:
        return
    config = json.dumps(with_models(DRAFTED[0], work.draft))
    options = ["--peers", peers, "--count", "2", "--max-tokens", str(work.tokens), "--repeats", "1"]
    command = [sys.executable, "-m", "foretoken", "bench", "race", "--target", str(work.target), *options]
    try:
        run = subprocess.run(
            [*command, "--speculative-config", config], capture_output=True, text=True, timeout=seconds, check=False
        )
        yield from (run.stdout or run.stderr).splitlines()
    except subprocess.TimeoutExpired:
        yield "the race took too long"


def main(
    target: Target = None,
    small: Small = False,
    draft: Draft = None,
    prompts: Prompts = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 128,
    batch: Annotated[list[int], typer.Option(min=2, help="Sequences at once; may be repeated.")] = [8, 32, 128],
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each configuration; the median counts.")] = 3,
    minutes: Annotated[float, typer.Option(min=0.0, help="No part begins later.")] = 9.0,
    peers: Annotated[str, typer.Option(help="Engines of the race at the end, as `bench race` takes them.")] = "none",
    output: Output = None,
) -> None:
    """Measures all parts; the exit code is 1 if any text differs from plain decoding."""
    single = [(0.0, 1), (1.0, 1)]
    batches = [(0.0, size) for size in batch]
    work = Work(
        target_path(target, small), draft, some_prompts(prompts, 8), tokens, repeats, time.monotonic() + 60 * minutes
    )
    measured = Measured(work)
    parts = [(PLAIN, "bf16", [*single, *batches]), (DRAFTED[0], "bf16", [*single, *batches])]
    parts += [(config, "bf16", single) for config in DRAFTED[1:]]
    parts += [(PLAIN, numbers, single[:1]) for numbers in QUANTIZED]
    with wide_console().status("") as status:
        for config, numbers, places in parts:
            status.update(f"{named(config)}, {numbers}")
            measured.run(config, numbers, places)
        race = list(raced(work, peers))
    heads = "method", "numbers", "temperature", "batch", "tokens/s", "ms a step", "tokens a step", "equal", *CALLS
    rows = [
        (
            *(f.method, f.numbers, f"{f.temperature:g}", f.batch, f"{f.tokens_per_second:,.0f}"),
            *(f"{f.milliseconds:.3f}", f"{f.tokens_per_step:.2f}", f"{f.equal}/{f.texts}"),
            *(f.calls.get(name, "") for name in CALLS),
        )
        for f in measured.figures
    ]
    missing = [f"not measured: {name}: {reason}" for name, reason in measured.missing.items()]
    facts = {"target": work.target.name, "tokens": tokens, "repeats": repeats}
    record = [asdict(f) for f in measured.figures]
    report([figures(heads, rows), *missing, *race], facts, output, figures=record, missing=measured.missing, race=race)
    raise typer.Exit(any(f.equal < f.texts for f in measured.figures))


if __name__ == "__main__":
    typer.run(main)
