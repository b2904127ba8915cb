"""The systems of the race, each asked for the same thing: one prompt, so many tokens, end-of-text ignored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from foretoken import LLM, SamplingParams
from foretoken.bench.measure import timed


@dataclass(frozen=True)
class Sample:
    """One completion: its tokens, seconds in all and to the first tokens, how many those were, target passes."""

    tokens: tuple[int, ...]
    seconds: float
    first_seconds: float
    first_tokens: int
    passes: int


@dataclass(frozen=True)
class System:
    """One row of the table. ``run(prompt, max_tokens)`` completes one prompt."""

    system: str
    method: str
    depth: int
    run: Callable[[str, int], Sample]

    @property
    def label(self) -> str:
        return f"{self.system} {self.method}" + (f" {self.depth}" if self.depth else "")


def foretoken_systems(target: Path, draft: Path, depths: Sequence[int], temperature: float) -> list[System]:
    """Plain decoding, the draft model and prompt lookup at each depth. The first two share their weights."""
    pair = LLM(target, draft, dtype="bfloat16")
    lookup = LLM(target, speculative_config={"method": "ngram"}, dtype="bfloat16")

    def runner(llm: LLM, depth: int) -> Callable[[str, int], Sample]:
        def run(prompt: str, max_tokens: int) -> Sample:
            params = SamplingParams(
                max_tokens=max_tokens, temperature=temperature, ignore_eos=True, speculative_tokens=depth
            )
            result = timed(llm, prompt, params)
            stats = result.output.stats
            return Sample(
                result.output.token_ids, result.seconds, result.first_seconds, result.first_tokens, stats.rounds
            )

        return run

    plain = System("foretoken", "plain", 0, runner(pair, 0))
    drafted = [System("foretoken", "draft_model", k, runner(pair, k)) for k in depths]
    looked_up = [System("foretoken", "ngram", k, runner(lookup, k)) for k in depths]
    return [plain, *drafted, *looked_up]


def transformers_systems(target: Path, draft: Path, depths: Sequence[int], temperature: float) -> list[System]:
    """transformers' generate, plain and assisted, with a constant depth and nothing that would bend the law."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(target)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval() for path in (target, draft)]
    for model in models:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    assistant = models[1].generation_config
    assistant.num_assistant_tokens_schedule = "constant"
    assistant.assistant_confidence_threshold = 0.0
    assistant.top_k = 0
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}

    def runner(depth: int) -> Callable[[str, int], Sample]:
        def run(prompt: str, max_tokens: int) -> Sample:
            assistant.num_assistant_tokens = depth
            extra = {"assistant_model": models[1]} if depth else {}
            return _generate(models[0], tokenizer, prompt, max_tokens, sampling | extra)

        return run

    plain = System("transformers", "plain", 0, runner(0))
    return [plain, *(System("transformers", "draft_model", k, runner(k)) for k in depths)]


def _generate(model: Any, tokenizer: Any, prompt: str, max_tokens: int, options: dict[str, Any]) -> Sample:
    """One ``generate``; stopping criteria are asked after every round, which tells prefill from decoding."""
    inputs = tokenizer(prompt, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    first: list[tuple[float, int]] = []
    passes = 0

    def watch(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if not first:
            first.append((perf_counter() - started, ids.shape[1] - length))
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = model.register_forward_pre_hook(count)
    try:
        with torch.inference_mode():
            started = perf_counter()
            ids = model.generate(**inputs, max_new_tokens=max_tokens, stopping_criteria=[watch], **options)
            seconds = perf_counter() - started
    finally:
        hook.remove()
    tokens = tuple(ids[0, length:].tolist())
    seconds_first, tokens_first = first[0] if first else (seconds, len(tokens))
    return Sample(tokens, seconds, seconds_first, tokens_first, passes)
