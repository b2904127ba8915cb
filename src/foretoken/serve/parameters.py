"""Converts request bodies to sampling parameters, and names parameters in errors as the client sent them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.params import SamplingParams
from foretoken.serve.chat_schema import ChatForm, ChatRequest
from foretoken.serve.errors import ApiError, as_api_error, invalid
from foretoken.serve.schema import Body, Generate, JsonObjectFormat, JsonSchemaFormat, Sampling

_CONVERTED = {"logit_bias", "prediction", "structured_outputs"}
_SAME = sorted({f.name for f in fields(SamplingParams)} & Sampling.model_fields.keys() - _CONVERTED)
_SYNONYMS = {"repeat_penalty": "repetition_penalty", "no_stop_trim": "include_stop_str_in_output"}
_STRUCTURED = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
_PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}  # values of no penalty
_EMPTY_IS_NONE = ("ebnf", "grammar", "regex")


def sampling(body: Generate, structured: Mapping[str, Any] | None = None, **parameters: Any) -> SamplingParams:
    """Returns the sampling parameters of a request.

    ``structured`` replaces the structured outputs of the body. Endpoints name ``parameters`` differently.

    Raises:
        InvalidRequest: A parameter is not valid.
        ApiError: A parameter is given under two names, or contradicts another.
    """
    values = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    for name, ours in _SYNONYMS.items():
        if (value := getattr(body, name)) is not None:
            if ours in values:
                raise invalid(f"{name} and {ours} are the same parameter; give one of them", param=name)
            values[ours] = value
    if body.repeat_last_n not in (None, -1) and any(
        values.get(name, none) != none for name, none in _PENALTIES.items()
    ):
        raise invalid(
            "repeat_last_n is not served beside a penalty: penalties count the whole prompt and output; send -1",
            param="repeat_last_n",
        )
    if body.logit_bias:
        values["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if body.prediction is not None:
        values["prediction"] = body.prediction.text
    requested = {} if structured else _requested(body)
    if len(requested) > 1:
        fields = list(requested)
        raise invalid(f"{' and '.join(fields)} ask for two things at once; give one of them", param=fields[1])
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        **values,
        **parameters,
        stop=[stop for stop in stops if stop],  # OpenAI's clients send empty ones, which end nothing
        explain=body.return_steps,
        structured_outputs=structured or next(iter(requested.values()), None),
    )


def _requested(body: Any) -> dict[str, dict[str, Any]]:
    """Returns the structured outputs of a body by the field that asks for them."""
    requested: dict[str, dict[str, Any]] = {}
    for name, kind in _STRUCTURED.items():
        value = getattr(body, name, None)
        if value is not None and not (name in _EMPTY_IS_NONE and value == ""):
            requested[name] = {kind: value}
    if (structured := getattr(body, "structured_outputs", None)) is not None:
        requested["structured_outputs"] = structured.model_dump(by_alias=True, exclude_none=True)
    form = getattr(body, "response_format", None)
    if isinstance(form, JsonObjectFormat | JsonSchemaFormat):
        schema = form.schema_ if isinstance(form, JsonObjectFormat) else form.json_schema.schema_
        requested["response_format"] = {"json": schema} if schema is not None else {"json_object": True}
    return requested


def sent_names(body: Body) -> dict[str, str]:
    """Returns the names under which a body has parameters of the engine, where they differ."""
    names = {"explain": "return_steps", "lora": "model"}
    names |= {ours: name for name, ours in _SYNONYMS.items() if getattr(body, name, None) is not None}
    form = isinstance(body, ChatForm)
    chat_names = body.sent_as if isinstance(body, ChatForm) else {}
    if form or isinstance(body, ChatRequest):
        names["prompt"] = "messages"
        if "max_completion_tokens" in chat_names or getattr(body, "max_completion_tokens", None) is not None:
            names["max_tokens"] = "max_completion_tokens"
    if isinstance(body, Sampling):
        otherwise = "response_format" if form else "structured_outputs"
        choice = getattr(body, "tool_choice", None)
        mode = getattr(getattr(choice, "allowed_tools", choice), "mode", getattr(choice, "type", choice))
        demands_call = getattr(body, "tools", None) and mode not in (None, "auto", "none")
        names["structured_outputs"] = "tools" if demands_call else next(iter(_requested(body)), otherwise)
    return {ours: chat_names.get(name, name) for ours, name in names.items()} | dict(chat_names)


def as_sent(error: Exception, names: Mapping[str, str]) -> Exception:
    """Returns an error about a parameter in terms of the field that the client sent. names: see ``sent_names``."""
    if not isinstance(error, InvalidRequest | ApiError):
        return error
    answer = as_api_error(error)
    param, message = answer.param, answer.message
    if param is not None and param in names:
        param = names[param]
    for ours, name in names.items():
        if "_" in ours:  # others are words of the language, too
            message = re.sub(rf"(?<![\w.]){ours}\b(\['\w+'\])?", name if ours != name else r"\g<0>", message)
    return ApiError(answer.status, message, answer.type, param, answer.code, answer.headers)
