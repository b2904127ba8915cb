"""vLLM's CPU build, driven step by step. Prefix caching is off, since repeats would hit the prefix cache."""

from __future__ import annotations

import json
import os
from time import perf_counter
from typing import Any

from foretoken.bench.peers.protocol import Answer, Complete, PeerRequest, Setup, Watch

KV_GIGABYTES = 1


def load(setup: Setup) -> tuple[Complete, str]:
    """Loads vLLM. The depth is fixed when an engine is created, so every depth is a separate process."""
    llm, vllm = engine(setup)

    def complete(request: PeerRequest) -> Answer:
        params = vllm.SamplingParams(
            max_tokens=request.max_tokens, temperature=request.temperature, ignore_eos=True, detokenize=False
        )
        return _drain(llm.llm_engine, request, params)

    return complete, vllm.__version__


def engine(setup: Setup, **arguments: Any) -> tuple[Any, Any]:
    """Returns ``vllm.LLM`` and the module. arguments: further ones of ``LLM``."""
    cores = sorted(os.sched_getaffinity(0))[: setup.threads]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIGABYTES),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # the cores that all systems use
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if setup.method == "dspark":
        _interpret_kernels()
        arguments = {"enforce_eager": True, **arguments}
    import vllm  # type: ignore[import-not-found]

    llm = vllm.LLM(
        setup.target,
        dtype="bfloat16",
        max_model_len=setup.max_length,
        max_num_seqs=max(8, setup.batch),
        enable_prefix_caching=False,
        speculative_config=speculation(setup),
        **arguments,
    )
    return llm, vllm


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


def _drain(engine: Any, request: PeerRequest, params: Any) -> Answer:
    """Adds all prompts and steps until they are done. Every output of a step is one pass of one sequence."""
    watch, passes = Watch(len(request.prompts)), 0
    done: dict[int, list[int]] = {}
    started = perf_counter()
    for number, prompt in enumerate(request.prompts):
        engine.add_request(f"{started}-{number}", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            number, tokens = int(output.request_id.rpartition("-")[2]), list(output.outputs[0].token_ids)
            watch.saw(number, len(tokens) - len(done.get(number, ())), perf_counter() - started)
            done[number] = tokens
            passes += 1
    return watch.answer([done[i] for i in range(len(request.prompts))], perf_counter() - started, passes)
