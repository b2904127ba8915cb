"""vLLM with any engine arguments and any ``speculative_config``, timed step by step.

One process drafts at every depth: the engine is created for the deepest, and the table that its scheduler reads
(vLLM's ``num_speculative_tokens_per_batch_size``) is set before each request. Proposers that learn from texts are
created once per depth, so that none finds what another has just written. A request without prompts resets them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from foretoken.bench.peers.protocol import PeerRequest, Setup

KV_GIGABYTES = "1"
_LEARN = ("custom_class", "suffix")


@dataclass(frozen=True)
class VllmStepTimes:
    """Completions, and the decode steps in which all sequences took part.

    Attributes:
        tokens: Token ids of each prompt's completion.
        passes: Passes of each prompt, without the first.
        seconds: Seconds of each such step.
        emitted: Tokens of each pass of each sequence.
        first_seconds: Seconds until every prompt had its first token.
    """

    tokens: list[list[int]]
    passes: list[int]
    seconds: list[float]
    emitted: list[int]
    first_seconds: float


def load(setup: Setup) -> tuple[Callable[[PeerRequest], VllmStepTimes], str]:
    """Loads vLLM. Options: "speculative_config" (None is plain) and "engine", further arguments of ``vllm.LLM``."""
    options = {name: json.loads(value) for name, value in setup.options}
    cores = sorted(os.sched_getaffinity(0))[: setup.threads]
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}  # this process drives the steps
    usual = {
        "VLLM_CPU_KVCACHE_SPACE": KV_GIGABYTES,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    os.environ |= fixed | {name: value for name, value in usual.items() if name not in os.environ}
    import vllm  # type: ignore[import-not-found]

    speculation = options.get("speculative_config")
    arguments = {"max_model_len": setup.max_length, "max_num_seqs": max(8, setup.batch)} | options.get("engine", {})
    llm = vllm.LLM(setup.target, enable_prefix_caching=False, speculative_config=speculation, **arguments)

    depths = Depths(llm, speculation, arguments["max_num_seqs"]) if speculation is not None else None

    def complete(request: PeerRequest) -> VllmStepTimes:
        if depths is not None:
            depths.choose(request.depth, fresh=not request.prompts)
        if not request.prompts:
            return VllmStepTimes([], [], [], [], 0.0)
        params = vllm.SamplingParams(
            max_tokens=request.max_tokens, temperature=request.temperature, ignore_eos=True, detokenize=False
        )
        return timed(llm.llm_engine, request, params)

    return complete, vllm.__version__


class Depths:
    """Sets the number of draft tokens of a running engine. max_sequences: its batch limit."""

    def __init__(self, llm: Any, speculation: dict[str, Any], max_sequences: int) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self.config, self.scheduler = llm.llm_engine.vllm_config, core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.speculation, self.max_sequences = speculation, max_sequences
        self.learned: dict[int, Any] = {}

    def choose(self, depth: int, fresh: bool) -> None:
        """Drafts ``depth`` tokens from now on. fresh: reset proposers that learn."""
        method = self.speculation["method"]
        if method in _LEARN:
            if fresh:
                self.learned.clear()
                vars(self.runner.model).pop("compute_logits", None)  # replaced by our proposers to see logits
            if depth not in self.learned:
                self.learned[depth] = made = type(self.runner.drafter)(self.config)
                made.depth = made.num_speculative_tokens = depth
                made.load_model(self.runner.model)
            self.runner.drafter = self.learned[depth]
        if method != "custom_class":  # a custom class does not receive the number
            made_for = depth == self.speculation["num_speculative_tokens"]  # then the engine's own setting applies
            self.scheduler.dynamic_sd_lookup = None if made_for else [depth] * (self.max_sequences + 1)


def timed(engine: Any, request: PeerRequest, params: Any) -> VllmStepTimes:
    """Adds all prompts and steps until they are done. Every output of a step is one pass of one sequence."""
    count = len(request.prompts)
    done: list[list[int]] = [[] for _ in range(count)]
    passes, seconds, emitted = [0] * count, [], []
    started = perf_counter()
    first_seconds = 0.0
    for number, prompt in enumerate(request.prompts):
        engine.add_request(f"{started}-{number}", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        fresh, before = [], perf_counter()
        outputs = engine.step()
        took = perf_counter() - before
        for output in outputs:
            number, tokens = int(output.request_id.rpartition("-")[2]), list(output.outputs[0].token_ids)
            if done[number]:
                passes[number] += 1
                fresh.append(len(tokens) - len(done[number]))
            done[number] = tokens
        emitted += fresh
        if len(fresh) == count:
            seconds.append(took)
        if not first_seconds and all(done):
            first_seconds = perf_counter() - started
    return VllmStepTimes(done, passes, seconds, emitted, first_seconds)
