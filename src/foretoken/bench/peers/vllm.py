"""vLLM's CPU build: driven step by step, or asked in OpenAI's words, with all parameters and counts of drafts.

Prefix caching is off, since repeats would hit the prefix cache.
"""

import json
import os
from time import perf_counter
from typing import Any

from foretoken.bench.peers.protocol import Answer, ApiComplete, Complete, PeerRequest, Setup

KV_GIGABYTES = 1
_LEARN = ("custom_class", "suffix")
_SAME = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "stop", "stop_token_ids", "seed", "n", "logprobs", "prompt_logprobs", "ignore_eos"),
    *("bad_words", "min_tokens"),
)
_COUNTS = {
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_draft_tokens",
}


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

    config: vLLM's ``speculative_config``, None for plain decoding. arguments: Further arguments of ``vllm.LLM``.
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


def load_api(setup: Setup) -> tuple[ApiComplete, str]:
    """Loads vLLM for requests of OpenAI's API, without compilation, which would take longer than an audit."""
    llm, vllm = engine(setup, speculation(setup), dtype="bfloat16", disable_log_stats=False, enforce_eager=True)

    def complete(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = [{} for _ in bodies]
        prompts, params, places = [], [], []
        for place, body in enumerate(bodies):
            try:
                params.append(_params(vllm, body))
            except (TypeError, ValueError) as error:
                answers[place] = {"error": str(error)}
                continue
            own = body["prompt"]
            prompts.append(own if isinstance(own, str) else {"prompt_token_ids": own})
            places.append(place)
        if not places:
            return answers
        before = _counted(llm)
        for place, output in zip(places, _generated(llm, prompts, params), strict=True):
            answers[place] = _answer(output)
        counts = {name: value - before[name] for name, value in _counted(llm).items()}
        answers[places[0]]["metrics"] = {"speculative_decoding": counts}  # of all, as vLLM does not tell them apart
        return answers

    return complete, vllm.__version__


def _generated(llm: Any, prompts: list[Any], params: list[Any]) -> Any:
    """Returns vLLM's outputs. A step that fails ends the process: its requests would never finish, nor later ones."""
    try:
        return llm.generate(prompts, params, use_tqdm=False)
    except Exception as error:
        if llm.llm_engine.has_unfinished_requests():
            raise SystemExit(f"{type(error).__name__}: {error}") from error
        raise


def _params(vllm: Any, body: dict[str, Any]) -> Any:
    given = {name: body[name] for name in _SAME if name in body}
    if "logit_bias" in body:
        given["logit_bias"] = {int(token): bias for token, bias in body["logit_bias"].items()}
    if "structured_outputs" in body:
        given["structured_outputs"] = vllm.sampling_params.StructuredOutputsParams(**body["structured_outputs"])
    return vllm.SamplingParams(**given)


def _counted(llm: Any) -> dict[str, int]:
    """Returns the draft tokens since the engine was created."""
    counts = dict.fromkeys(_COUNTS.values(), 0)
    for metric in llm.get_metrics():
        if metric.name in _COUNTS:
            counts[_COUNTS[metric.name]] += metric.value
    return counts


def _answer(output: Any) -> dict[str, Any]:
    """Returns a completion as the API has it, its tokens named by their ids."""
    choices = [
        {
            "index": each.index,
            "text": each.text,
            "finish_reason": each.finish_reason,
            "token_ids": list(each.token_ids),
            "prompt_token_ids": list(output.prompt_token_ids),
            "logprobs": None if each.logprobs is None else _logprobs(each.token_ids, each.logprobs),
        }
        for each in output.outputs
    ]
    scored = [
        row and {str(t): {"logprob": one.logprob} for t, one in row.items()} for row in output.prompt_logprobs or ()
    ]
    usage = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(choice["token_ids"]) for choice in choices),
    }
    return {"choices": choices, "usage": usage, "prompt_logprobs": scored}


def _logprobs(tokens: Any, rows: Any) -> dict[str, Any]:
    content = [
        {
            "id": token,
            "token": "",
            "logprob": row[token].logprob,
            "top_logprobs": [{"id": other, "logprob": one.logprob} for other, one in row.items()],
        }
        for token, row in zip(tokens, rows, strict=True)
    ]
    return {"content": content}
