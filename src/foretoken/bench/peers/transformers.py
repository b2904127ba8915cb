"""transformers' ``generate`` as documented: plain, with an assistant model, or with prompt lookup."""

from time import perf_counter
from typing import Any

from foretoken.bench.peers.protocol import Answer, Complete, PeerRequest, Setup, Watch


def load(setup: Setup) -> tuple[Complete, str]:
    """Loads transformers with a constant depth, no confidence threshold, and no top-k on the draft (it would bias)."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(setup.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    paths = [setup.target, *([setup.draft] if setup.draft else [])]
    seq2seq = transformers.AutoConfig.from_pretrained(setup.target).is_encoder_decoder
    kind = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    models: list[Any] = [kind.from_pretrained(path, dtype=torch.bfloat16).to(device).eval() for path in paths]
    for model in models:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    if setup.draft:
        assistant = models[1].generation_config
        assistant.num_assistant_tokens_schedule = "constant"
        assistant.assistant_confidence_threshold = 0.0
        assistant.top_k = 0

    def complete(request: PeerRequest) -> Answer:
        options: dict[str, Any] = {"do_sample": False}
        if request.temperature:
            options = {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
        if request.depth and setup.method == "ngram":
            options["prompt_lookup_num_tokens"] = request.depth
        elif request.depth:
            models[1].generation_config.num_assistant_tokens = request.depth
            options["assistant_model"] = models[1]
        return _generate(models[0], request.prompts[0], request.max_tokens, options)

    return complete, transformers.__version__


def _generate(model: Any, prompt: list[int], max_tokens: int, options: dict[str, Any]) -> Answer:
    """Runs ``generate``. Stopping criteria run after every step, which separates prefill from decoding."""
    import torch

    ids = torch.tensor([prompt], device=model.device)
    first = 1 if model.config.is_encoder_decoder else len(prompt)  # a start token, or the prompt
    watch, seen, passes = Watch(1), first, 0

    def look(all_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        nonlocal seen
        watch.saw(0, all_ids.shape[1] - seen, perf_counter() - started)
        seen = all_ids.shape[1]
        return torch.zeros(1, dtype=torch.bool, device=all_ids.device)

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = model.register_forward_pre_hook(count)
    try:
        with torch.inference_mode():
            started = perf_counter()
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, stopping_criteria=[look], **options
            )
            seconds = perf_counter() - started
    finally:
        hook.remove()
    return watch.answer([out[0, first:].tolist()], seconds, passes)
