"""vLLM's ``LLM.generate``, asked in OpenAI's words: all sampling parameters, log-probabilities, counts of drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretoken.bench.peers.protocol import ApiAnswer, ApiRequest, Setup
from foretoken.bench.peers.vllm import engine, speculation

REQUEST = ApiRequest
_SAME = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "stop", "stop_token_ids", "seed", "n", "logprobs", "prompt_logprobs", "ignore_eos"),
    *("bad_words", "min_tokens"),
)
_COUNTS = {
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_draft_tokens",
}


def load(setup: Setup) -> tuple[Callable[[ApiRequest], ApiAnswer], str]:
    """Loads vLLM, without compilation, which would take longer than the audit."""
    llm, vllm = engine(setup, speculation(setup), dtype="bfloat16", disable_log_stats=False, enforce_eager=True)

    def complete(request: ApiRequest) -> ApiAnswer:
        answers: list[dict[str, Any]] = [{} for _ in request.bodies]
        prompts, params, places = [], [], []
        for place, body in enumerate(request.bodies):
            try:
                params.append(_params(vllm, body))
            except (TypeError, ValueError) as error:
                answers[place] = {"error": str(error)}
                continue
            own = body["prompt"]
            prompts.append(own if isinstance(own, str) else {"prompt_token_ids": own})
            places.append(place)
        if not places:
            return ApiAnswer(answers)
        before = _counted(llm)
        for place, output in zip(places, _generated(llm, prompts, params), strict=True):
            answers[place] = _answer(output)
        counts = {name: value - before[name] for name, value in _counted(llm).items()}
        answers[places[0]]["metrics"] = {"speculative_decoding": counts}  # of all, as vLLM does not tell them apart
        return ApiAnswer(answers)

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
