"""OpenVINO GenAI on a model that optimum-intel exported (see ``export.py``)."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from foretoken.bench.peers.protocol import Answer, Complete, PeerRequest, Setup, Watch

KV_GIGABYTES = 1


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
