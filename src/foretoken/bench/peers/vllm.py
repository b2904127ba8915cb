"""vLLM's CPU build, driven step by step. Prefix caching is off, since repeats would hit the prefix cache."""

from __future__ import annotations

import json
import os
from time import perf_counter
from typing import Any

from foretoken.bench.peers.protocol import Answer, Complete, PeerRequest, Setup

KV_GIGABYTES = 1
_LEARN = ("custom_class", "suffix")


def load(setup: Setup) -> tuple[Complete, str]:
    """Loads vLLM. Race: the depth is fixed when an engine is created, so every depth is a separate process.

    Plans: one process drafts at every depth. Options: "speculative_config" (None is plain) and "engine", further
    arguments of ``vllm.LLM``. A request without prompts resets proposers that learn.
    """
    options = {name: json.loads(value) for name, value in setup.options}
    planned = "engine" in options
    config = options.get("speculative_config") if planned else speculation(setup)
    arguments: dict[str, Any] = options["engine"] if planned else {"dtype": "bfloat16"}
    llm, vllm = engine(setup, config, **arguments)
    sizes = arguments.get("max_num_seqs", max(8, setup.batch))
    depths = Depths(llm, config, sizes) if planned and config is not None else None

    def complete(request: PeerRequest) -> Answer:
        if depths is not None:
            depths.choose(request.depth, fresh=not request.prompts)
        if not request.prompts:
            return Answer([], 0.0, 0.0, 0, 0)
        params = vllm.SamplingParams(
            max_tokens=request.max_tokens, temperature=request.temperature, ignore_eos=True, detokenize=False
        )
        return timed(llm.llm_engine, request, params)

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


def timed(engine: Any, request: PeerRequest, params: Any) -> Answer:
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
    total = perf_counter() - started
    return Answer(done, total, first_seconds, first_tokens, sum(passes) + count, passes, seconds, emitted)


class Depths:
    """Sets the number of draft tokens of a running engine, which was created for the most.

    The table that its scheduler reads (vLLM's ``num_speculative_tokens_per_batch_size``) is set before each request.
    Proposers that learn from texts are created once per depth, so that none finds what another has just written.

    Args:
        llm: ``vllm.LLM``.
        speculation: Its ``speculative_config``.
        max_sequences: Its batch limit.
    """

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
