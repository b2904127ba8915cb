"""Everything that is claimed of a GPU, within ten minutes: steps, drafts, temperatures, batches, number formats, calls.

The most important figures come first; parts for which no time is left are listed. Every text is compared with plain
decoding. ``--small`` runs on any device, where calls of the driver are not counted and the figures mean nothing.
``--interpreted`` runs the same path on a CPU with a tiny random pair, its kernels in Triton's interpreter, in minutes.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from foretoken import LLM, CompletionOutput, SamplingParams
from foretoken.bench.output import listing, report, wide_console
from foretoken.core.devices import wait_for
from foretoken.core.errors import ForetokenError
from foretoken.core.native.build import SWITCH
from foretoken.models.runners import choose
from foretoken.models.runners.cuda.graphs import States
from foretoken.models.runners.cuda.runner import CudaRunner
from foretoken.train.block_heads import DSparkHead
from foretoken.train.config import DSparkTrainConfig, Eagle3Config, MtpTrainConfig
from foretoken.train.eagle import Eagle3Head
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.head import Head
from foretoken.train.mtp import MtpHead
from foretoken.train.shapes import LlamaShape
from options import Config, Draft, Output, Small, SomePrompts, Target, label, some_prompts, target_path, with_models
from request_fuzz import Pair

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
UNTRAINED = "untrained"  # stands for a head with random weights, where none is bundled
RANDOM_HEADS: dict[str, Callable[[FrozenTarget, Tensor], Head]] = {
    "eagle3": partial(Eagle3Head, Eagle3Config()),
    "mtp": partial(MtpHead, MtpTrainConfig()),
    "dspark": partial(DSparkHead, DSparkTrainConfig(gated=True)),
}
TINY = LlamaShape(32, 48, 3, 1, 1, 32, 512)  # the interpreter takes milliseconds for each row, layer and head
QUANTIZED = ("int8", "int4")
CALLS = {  # names of the profiler, by their beginnings
    "launches": ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "reads": ("Memcpy DtoH",),
    "copies": ("Memcpy HtoD",),
}
COLUMNS = {
    "method": "{method}",
    "numbers": "{numbers}",
    "temperature": "{temperature:g}",
    "batch": "{batch}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "ms a step": "{milliseconds:.3f}",
    "tokens a step": "{tokens_per_step:.2f}",
    "equal": "{equal}/{texts}",
} | {name: f"{{calls[{name}]}}" for name in CALLS}


class Repeated:
    """Runs the function again at every replay and, as a graph does, writes over the tensors of the first time."""

    def __init__(self, device: torch.device) -> None:
        """Takes what ``CudaCapture`` takes."""

    def capture(self, function: Callable[[], States]) -> Callable[[], States]:
        static = {key: state.clone() for key, state in function().items()}

        def replay() -> States:
            for key, state in function().items():
                static[key].copy_(state)
            return static

        return replay


@contextmanager
def interpreting(folder: Path) -> Iterator[Pair]:
    """Lets models on a CPU take a GPU's path. Yields a tiny pair. Triton must not be imported before."""
    chosen = patch.multiple(choose, has_kernels=lambda _: True, CudaRunner=partial(CudaRunner, capture=Repeated))
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1", SWITCH: "0"}), chosen:
        yield Pair(folder, TINY)


def untrained_head(method: str, target: Path, folder: Path) -> Path:
    """Writes a head with random weights: its time is that of a trained one, its acceptance is not."""
    frozen = FrozenTarget(target, torch.device("cpu"))
    head = RANDOM_HEADS[method](frozen, torch.ones(frozen.vocab))
    (folder / "config.json").write_text(json.dumps(head.describe(frozen)))
    save_file(head.tensors(frozen), folder / "model.safetensors")
    return folder


def named(config: Config) -> str:
    return f"{label(config)}, {UNTRAINED}" if config.get("model") == UNTRAINED else label(config)


@dataclass
class Measurement:
    """Measurements of one model after another.

    Attributes:
        end: Time after which nothing more is measured.
        figures: A record for each configuration, temperature and batch.
        missing: Reasons why there is no record, by configuration.
    """

    target: Path
    draft: Path | None
    prompts: Sequence[str]
    tokens: int
    repeats: int
    end: float
    figures: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    _plain: dict[tuple[str, float], list[tuple[int, ...]]] = field(default_factory=dict)  # texts that all must equal

    def run(self, config: Config, numbers: str, places: Sequence[tuple[float, int]]) -> None:
        """Loads a configuration and measures it at each temperature and batch. Reasons for none are recorded."""
        name = f"{named(config)}, {numbers}"
        if time.monotonic() > self.end:
            self.missing[name] = "no time was left"
            return
        config = with_models(config, self.draft, HEADS)
        method = named(config)
        with TemporaryDirectory() as folder:
            if config.get("model") == UNTRAINED:
                config["model"] = str(untrained_head(config["method"], self.target, Path(folder)))
            try:
                llm = LLM(
                    self.target,
                    dtype="bfloat16",
                    quantization=None if numbers == "bf16" else numbers,
                    speculative_config=config,
                    max_num_seqs=max(batch for _, batch in places),
                )
            except ForetokenError as error:
                self.missing[name] = str(error)
                return
        for temperature, batch in places:
            if time.monotonic() > self.end:
                self.missing[f"{name}, temperature {temperature:g}, batch {batch}"] = "no time was left"
            else:
                place = {"method": method, "numbers": numbers, "temperature": temperature, "batch": batch}
                self.figures.append(place | self._figure(llm, numbers, temperature, batch))
        del llm
        gc.collect()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()

    def _figure(self, llm: LLM, numbers: str, temperature: float, batch: int) -> dict[str, Any]:
        """Returns the speed, the number of ``texts`` that equal the plain ones, and the calls of the driver."""
        self._complete(llm, temperature, batch)  # graphs are captured
        runs = [self._complete(llm, temperature, batch) for _ in range(self.repeats)]
        outputs, seconds = runs[-1][0], median(seconds for _, seconds in runs)
        texts, steps = [output.token_ids for output in outputs], [output.stats.steps for output in outputs]
        plain, total = self._plain.setdefault((numbers, temperature), []), sum(map(len, texts))
        plain += texts[len(plain) :]
        return {
            "tokens_per_second": total / seconds,
            "milliseconds": 1e3 * seconds / max(steps),
            "tokens_per_step": total / sum(steps),
            "equal": sum(one == other for one, other in zip(texts, plain, strict=False)),
            "texts": len(texts),
            "calls": self._calls(llm, temperature, batch),
        }

    def _complete(self, llm: LLM, temperature: float, batch: int) -> tuple[list[CompletionOutput], float]:
        """Completes ``batch`` prompts together, each with a seed. Returns the outputs and the seconds."""
        prompts = [self.prompts[i % len(self.prompts)] for i in range(batch)]
        params = [
            SamplingParams(max_tokens=self.tokens, temperature=temperature, seed=i, ignore_eos=True)
            for i in range(batch)
        ]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wait_for(llm.target.device)
        return [output.outputs[0] for output in outputs], time.perf_counter() - started

    def _calls(self, llm: LLM, temperature: float, batch: int) -> dict[str, float]:
        """Returns the calls of the driver in a step, prefill included; none without a GPU."""
        if llm.target.device.type != "cuda":
            return {}
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            outputs, _ = self._complete(llm, temperature, batch)
        steps = max(output.stats.steps for output in outputs)
        counts = [(event.key, event.count) for event in profiled.key_averages()]
        return {
            name: round(sum(count for key, count in counts if key.startswith(beginnings)) / steps, 2)
            for name, beginnings in CALLS.items()
        }

    def race(self, peers: str) -> Iterator[str]:
        """Runs the race against other engines on prompts of our own. Yields its lines."""
        seconds = self.end - time.monotonic()
        if peers == "none" or seconds <= 0:
            return
        config = json.dumps(with_models(DRAFTED[0], self.draft))
        options = ["--peers", peers, "--count", "2", "--max-tokens", str(self.tokens), "--repeats", "1"]
        command = [sys.executable, "-m", "foretoken", "bench", "race", "--target", str(self.target), *options]
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
    interpreted: Annotated[bool, typer.Option(help="A tiny random pair on a CPU, by Triton's interpreter.")] = False,
    draft: Draft = None,
    prompts: SomePrompts = None,
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
    runs = [(PLAIN, "bf16", [*single, *batches]), (DRAFTED[0], "bf16", [*single, *batches])]
    runs += [(config, "bf16", single) for config in DRAFTED[1:]]
    runs += [(PLAIN, numbers, single[:1]) for numbers in QUANTIZED]
    with ExitStack() as stack:
        texts = some_prompts(prompts, 8)
        if interpreted:
            pair = stack.enter_context(interpreting(Path(stack.enter_context(TemporaryDirectory()))))
            target, draft, texts = pair.target, pair.draft, ["def"]
            untrained = {method: {"model": UNTRAINED} for method in HEADS}
            runs = [(run[0] | untrained.get(run[0]["method"], {}), *run[1:]) for run in runs]
        path, end = target_path(target, small), time.monotonic() + 60 * minutes
        measured = Measurement(path, draft, texts, tokens, repeats, end)
        status = stack.enter_context(wide_console().status(""))
        for config, numbers, places in runs:
            status.update(f"{named(config)}, {numbers}")
            measured.run(config, numbers, places)
        race = list(measured.race(peers))
    missing = [f"not measured: {name}: {reason}" for name, reason in measured.missing.items()]
    facts = {"target": path.name, "tokens": tokens, "repeats": repeats}
    figures, parts = measured.figures, [*missing, *race]
    report([listing(COLUMNS, figures), *parts], facts, output, figures=figures, missing=measured.missing, race=race)
    raise typer.Exit(any(figure["equal"] < figure["texts"] for figure in figures))


if __name__ == "__main__":
    typer.run(main)
