"""vLLM with any engine arguments and any ``speculative_config``, timed step by step.

One process drafts at every depth: the engine is created for the deepest, and the table that its scheduler reads
(vLLM's ``num_speculative_tokens_per_batch_size``) is set before each request. Proposers that learn from texts are
created once per depth, so that none finds what another has just written. A request without prompts resets them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from foretoken.bench.peers.protocol import PeerRequest, Setup
from foretoken.bench.peers.vllm import VllmStepTimes, engine, timed

_LEARN = ("custom_class", "suffix")


def load(setup: Setup) -> tuple[Callable[[PeerRequest], VllmStepTimes], str]:
    """Loads vLLM. Options: "speculative_config" (None is plain) and "engine", further arguments of ``vllm.LLM``."""
    options = {name: json.loads(value) for name, value in setup.options}
    config, arguments = options.get("speculative_config"), options.get("engine", {})
    llm, vllm = engine(setup, config, **arguments)
    max_sequences = arguments.get("max_num_seqs", max(8, setup.batch))
    depths = Depths(llm, config, max_sequences) if config is not None else None

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
