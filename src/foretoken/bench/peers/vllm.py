"""vLLM's CPU build, driven step by step. Prefix caching is off, since repeats would hit the prefix cache."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from foretoken.bench.peers.protocol import Answer, Complete, PeerRequest, Setup

KV_GIGABYTES = 1


def load(setup: Setup) -> tuple[Complete, str]:
    """Loads vLLM. The depth is fixed when an engine is created, so every depth is a separate process."""
    llm, vllm = engine(setup, speculation(setup), dtype="bfloat16")

    def complete(request: PeerRequest) -> Answer:
        params = vllm.SamplingParams(
            max_tokens=request.max_tokens, temperature=request.temperature, ignore_eos=True, detokenize=False
        )
        times = timed(llm.llm_engine, request, params)
        passes = sum(times.passes) + len(request.prompts)
        return Answer(times.tokens, times.total_seconds, times.first_seconds, times.first_tokens, passes)

    return complete, vllm.__version__


def engine(setup: Setup, config: dict[str, Any] | None = None, **arguments: Any) -> tuple[Any, Any]:
    """Returns ``vllm.LLM`` and the module. Variables of the environment that the user has set are kept.

    Args:
        setup: Models and settings.
        config: vLLM's ``speculative_config``, None for plain decoding.
        arguments: Further arguments of ``vllm.LLM``.
    """
    cores = sorted(os.sched_getaffinity(0))[: setup.threads]
    usual = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIGABYTES),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # the cores that all systems use
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    # This process drives the steps.
    os.environ |= {**usual, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    if setup.method == "dspark":
        _interpret_kernels()
        arguments = {"enforce_eager": True, **arguments}
    import vllm  # type: ignore[import-not-found]

    usual_sizes = {"max_model_len": setup.max_length, "max_num_seqs": max(8, setup.batch)}
    options = {**usual_sizes, "enable_prefix_caching": False, "speculative_config": config, **arguments}
    return vllm.LLM(setup.target, **options), vllm


def speculation(setup: Setup) -> dict[str, Any] | None:
    """Returns vLLM's ``speculative_config``, None for plain decoding."""
    if setup.method == "plain":
        return None
    config = {"method": setup.method, "num_speculative_tokens": setup.depth}
    if setup.method == "draft_model":  # whose options are those of our own
        return config | {"model": setup.draft}
    options = {name: json.loads(value) for name, value in setup.options}
    if setup.method == "ngram":
        return config | {"prompt_lookup_min": 1, "prompt_lookup_max": 4} | options
    return config | {"model": setup.draft} | options


def _interpret_kernels() -> None:
    """Has Triton's interpreter run vLLM's kernels, of which Triton's releases compile none for CPUs.

    DSpark drafts in vLLM's second model runner alone, whose kernels are Triton's. Results are the same, and take about
    a second a pass.
    """
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}  # read when triton is first imported
    from triton import backends

    inactive = type("Inactive", (), {"is_active": staticmethod(lambda: False)})
    backends.backends.setdefault("cpu", backends.Backend(compiler=None, driver=inactive))


@dataclass(frozen=True)
class VllmStepTimes:
    """Completions, and the decode steps in which all sequences took part.

    Attributes:
        tokens: Token ids of each prompt's completion.
        passes: Passes of each prompt, without the first.
        seconds: Seconds of each such step.
        emitted: Tokens of each pass of each sequence.
        first_seconds: Seconds until every prompt had its first token.
        first_tokens: All tokens emitted by then.
        total_seconds: Seconds of all steps, the prompts' included.
    """

    tokens: list[list[int]]
    passes: list[int]
    seconds: list[float]
    emitted: list[int]
    first_seconds: float
    first_tokens: int = 0
    total_seconds: float = 0.0


def timed(engine: Any, request: PeerRequest, params: Any) -> VllmStepTimes:
    """Adds all prompts and steps until they are done. Every output of a step is one pass of one sequence."""
    count = len(request.prompts)
    done: list[list[int]] = [[] for _ in range(count)]
    passes, seconds, emitted = [0] * count, [], []
    started = perf_counter()
    first_seconds, first_tokens = 0.0, 0
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
            first_seconds, first_tokens = perf_counter() - started, sum(map(len, done))
    return VllmStepTimes(done, passes, seconds, emitted, first_seconds, first_tokens, perf_counter() - started)
