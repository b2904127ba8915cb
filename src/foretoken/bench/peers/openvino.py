"""OpenVINO GenAI on a model that optimum-intel exported (see ``export.py``)."""

import json
import random
from time import perf_counter
from typing import Any

from foretoken.bench.peers.protocol import Answer, ApiComplete, Complete, PeerRequest, Setup, Watch

KV_GIGABYTES = 1
_NAMES = {
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "seed": "rng_seed",
    "stop": "stop_strings",
    "min_tokens": "min_new_tokens",
} | {
    name: name
    for name in (
        *("ignore_eos", "temperature", "top_p", "top_k", "min_p", "stop_token_ids"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    )
}
_SETS = ("stop", "stop_token_ids")


def load(setup: Setup) -> tuple[Complete, str]:
    """Loads the pipeline, with the draft model if there is one."""
    import numpy
    import openvino  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    pipe = pipeline(setup)

    class Streamer(genai.StreamerBase):
        """Called once per decode step, with the step's tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.watch, self.calls, self.started = Watch(1), 0, perf_counter()

        def write(self, tokens: Any) -> Any:
            self.watch.saw(0, 1 if isinstance(tokens, int) else len(tokens), perf_counter() - self.started)
            self.calls += 1
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            return

    def complete(request: PeerRequest) -> Answer:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.apply_chat_template = request.max_tokens, True, False
        config.do_sample = request.temperature > 0
        if request.temperature:
            config.temperature, config.top_p, config.top_k = request.temperature, 1.0, 0
        if request.depth:
            config.num_assistant_tokens = request.depth
        ids = openvino.Tensor(numpy.array([request.prompts[0]], dtype=numpy.int64))
        streamer = Streamer()
        result = pipe.generate(ids, config, streamer)
        seconds = perf_counter() - streamer.started
        return streamer.watch.answer([list(result.tokens[0])], seconds, streamer.calls)

    return complete, genai.__version__.partition("-")[0]  # without the build


def pipeline(setup: Setup) -> Any:
    """Returns ``LLMPipeline``: bf16 by the precision hint, prefix caching off, or repeats would hit the cache."""
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = KV_GIGABYTES
    scheduler.enable_prefix_caching = False
    precision = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": setup.threads}
    drafting = {"draft_model": genai.draft_model(setup.draft, "CPU", **precision)} if setup.draft else {}
    return genai.LLMPipeline(setup.target, "CPU", scheduler_config=scheduler, **precision, **drafting)


def load_api(setup: Setup) -> tuple[ApiComplete, str]:
    """Loads the pipeline for requests of OpenAI's API, one at a time. It tells no log-probabilities."""
    import numpy
    import openvino
    import openvino_genai as genai

    pipe = pipeline(setup)
    tokenizer, chance = pipe.get_tokenizer(), random.Random()

    def one(body: dict[str, Any]) -> dict[str, Any]:
        own = body["prompt"]
        prompt = tokenizer.encode(own).input_ids.data[0].tolist() if isinstance(own, str) else own
        # Without a seed, every call would use the same random numbers.
        given = {"seed": chance.getrandbits(31)} | body
        try:
            config = _config(genai, given)
            if setup.draft:
                config.num_assistant_tokens = setup.depth
            config.validate()
        except (TypeError, ValueError, RuntimeError) as error:
            return {"error": str(error)}
        result = pipe.generate(openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), config)
        length = genai.GenerationFinishReason.LENGTH
        choices = [
            {
                "index": index,
                "text": tokenizer.decode(tokens),
                "finish_reason": "length" if reason == length else "stop",
                "token_ids": list(tokens),
                "prompt_token_ids": prompt,
            }
            for index, (tokens, reason) in enumerate(zip(result.tokens, result.finish_reasons, strict=True))
        ]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sum(map(len, result.tokens))}
        return {"choices": choices, "usage": usage, "metrics": {"speculative_decoding": _counts(result)}}

    return lambda bodies: [one(body) for body in bodies], genai.__version__.partition("-")[0]


def _config(genai: Any, body: dict[str, Any]) -> Any:
    config = genai.GenerationConfig()
    config.apply_chat_template = False
    for name, value in body.items():
        if name in _NAMES:
            setattr(config, _NAMES[name], set(value) if name in _SETS else value)
    config.do_sample = body.get("temperature", 1.0) > 0
    if not config.do_sample:
        config.temperature = 1.0
    if config.stop_token_ids:
        config.ignore_eos = False  # which ignores these as well
    if schema := body.get("structured_outputs"):
        config.structured_output_config = genai.StructuredOutputConfig(json_schema=json.dumps(schema["json"]))
    return config


def _counts(result: Any) -> dict[str, int]:
    """Returns the pipeline's counts of draft tokens; without a draft model it counts none."""
    known = result.extended_perf_metrics
    if known is None:
        return {"num_draft_tokens": 0}
    return {
        "num_draft_tokens": known.get_num_draft_tokens(),
        "num_accepted_draft_tokens": known.get_num_accepted_tokens(),
    }
