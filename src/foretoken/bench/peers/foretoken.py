"""Foretoken as its users call it: ``LLM.stream`` on one prompt or several."""

import json
from itertools import count
from time import perf_counter

from foretoken.bench.peers.protocol import OWN_CHOICE, Answer, Complete, PeerRequest, Setup, Watch
from foretoken.models.options import QUANTIZATIONS


def load(setup: Setup) -> tuple[Complete, str]:
    """Loads Foretoken. ``setup.options`` is the speculative config."""
    import torch

    from foretoken import LLM, SamplingParams, __version__

    if setup.threads:  # else as many as it chooses by itself
        torch.set_num_threads(setup.threads)
    config = {name: json.loads(value) for name, value in setup.options}
    llm = LLM(
        setup.target,
        speculative_config=config | ({"model": setup.draft} if setup.draft else {}),
        dtype="bfloat16",
        max_model_len=setup.max_length,
        max_num_seqs=max(16, setup.batch),
        quantization=quantization(setup),
    )

    salts = count()

    def complete(request: PeerRequest) -> Answer:
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            ignore_eos=True,
            cache_salt=str(next(salts)),  # nothing is known from an earlier turn of the same prompts
            speculative_tokens=None if request.depth == OWN_CHOICE else request.depth,
        )
        watch, outputs = Watch(len(request.prompts)), {}
        started = perf_counter()
        for piece in llm.stream(request.prompts, params):
            watch.saw(piece.request_id, len(piece.token_ids), perf_counter() - started)
            if piece.output is not None:
                outputs[piece.request_id] = piece.output
        seconds = perf_counter() - started
        done = [outputs[number] for number in sorted(outputs)]
        return watch.answer([list(o.token_ids) for o in done], seconds, sum(o.stats.steps for o in done))

    return complete, __version__


def quantization(setup: Setup) -> str | None:
    """Returns the quantization on loading that gives the weights of ``setup``; None if the checkpoint has them."""
    return setup.weights if setup.weights in QUANTIZATIONS else None
