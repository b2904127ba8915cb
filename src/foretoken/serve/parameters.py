"""Converts request bodies to sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.params import SamplingParams
from foretoken.serve.chat_schema import ChatRequest, JsonObjectFormat, JsonSchemaFormat
from foretoken.serve.errors import invalid
from foretoken.serve.schema import Generate

_SAME = (
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "bad_words",
    "ignore_eos",
    "include_stop_str_in_output",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "skip_special_tokens",
    "stop_token_ids",
    "top_k",
    "allowed_token_ids",
    "cache_salt",
    "exactness",
    "speculative_method",
    "speculative_tokens",
)


def sampling(body: Generate, structured: Mapping[str, Any] | None = None, **own: Any) -> SamplingParams:
    """Returns the sampling parameters of a request.

    Args:
        body: The request.
        structured: Structured outputs in place of those in the body.
        own: Parameters that the endpoints name differently.

    Raises:
        InvalidRequest: A parameter is not valid.
    """
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if body.prediction is not None:
        given["prediction"] = body.prediction.text
    return SamplingParams(
        **given, **own, explain=body.return_steps, structured_outputs=structured or structured_outputs(body)
    )


def structured_outputs(body: Generate) -> dict[str, Any] | None:
    """Returns the structured outputs, which have several field names. Raises ApiError if two are given."""
    asked: dict[str, dict[str, Any]] = {}
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            asked[f"guided_{kind}"] = {kind: value}
    if body.structured_outputs is not None:
        asked["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    if isinstance(body, ChatRequest):
        form = body.response_format
        if isinstance(form, JsonObjectFormat):
            asked["response_format"] = {"json_object": True}
        elif isinstance(form, JsonSchemaFormat):
            schema = form.json_schema.schema_
            asked["response_format"] = {"json": schema} if schema is not None else {"json_object": True}
    if len(asked) > 1:
        raise invalid(f"{' and '.join(asked)} ask for two things at once; give one of them", param=list(asked)[1])
    return next(iter(asked.values()), None)
