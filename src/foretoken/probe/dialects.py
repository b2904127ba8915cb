"""What each server calls its parameters, and how it switches speculation off for one request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from foretoken.probe.client import EndpointClient


class ServerKind(StrEnum):
    """The kinds of server that the audit knows."""

    AUTO = "auto"
    FORETOKEN = "foretoken"
    VLLM = "vllm"
    LLAMACPP = "llamacpp"
    SGLANG = "sglang"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of server.

    Attributes:
        kind: Its kind, or the name of an engine.
        neutral: Fields that switch its default filters off, so that texts follow softmax(logits / temperature).
        plain: Fields that switch speculation off for one request; None where only another server decodes plainly.
        depth: Field of the draft length of one request, "" where there is none.
        endless: Fields that keep a text going after an end-of-sequence token, without changing what is sampled.
        told: Fields that make it tell token ids.
        scores: Whether it has vLLM's ``prompt_logprobs``.
        names: Its names of parameters, by OpenAI's or vLLM's.
        unknown: Parameters that it does not claim to have.
        window: Number of last tokens, the prompt's included, that penalties count; None where presence and frequency
            count the text alone and repetition counts both.
    """

    kind: str
    neutral: Mapping[str, Any]
    plain: Mapping[str, Any] | None = None
    depth: str = ""
    endless: Mapping[str, Any] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)
    scores: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()
    window: int | None = None

    def grammar(self, schema: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        """Returns the fields that constrain a text to a JSON schema."""
        if chat or self.kind is ServerKind.OPENAI:
            named = {"name": "audit", "schema": schema, "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        match self.kind:
            case ServerKind.LLAMACPP:
                return {"json_schema": schema}
            case ServerKind.SGLANG:
                return {"json_schema": json.dumps(schema)}
            case _:
                return {"structured_outputs": {"json": schema}}

    def name(self, parameter: str) -> str:
        """Returns its own name of a parameter."""
        return self.names.get(parameter, parameter)


_NEUTRAL = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_NOT_OPENAI = frozenset({"top_k", "min_p", "repetition_penalty", "bad_words", "min_tokens", "stop_token_ids"})

DIALECTS: Mapping[str, Dialect] = {
    dialect.kind: dialect
    for dialect in (
        Dialect(
            ServerKind.FORETOKEN,
            {**_NEUTRAL, "top_k": 0},
            plain={"speculative_tokens": 0},
            depth="speculative_tokens",
            endless={"ignore_eos": True},
            told={"return_token_ids": True},
            scores=True,
        ),
        Dialect(
            ServerKind.VLLM,
            {**_NEUTRAL, "top_k": -1},
            endless={"ignore_eos": True},
            told={"return_token_ids": True},
            scores=True,
        ),
        Dialect(
            ServerKind.SGLANG,
            {**_NEUTRAL, "top_k": -1},
            endless={"ignore_eos": True},
            told={"return_token_ids": True},
            unknown=frozenset({"bad_words"}),
        ),
        Dialect(
            ServerKind.LLAMACPP,
            {"top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "top_k": 0, "typical_p": 1.0},
            plain={"speculative.n_max": 0},
            names={"repetition_penalty": "repeat_penalty"},
            unknown=frozenset({"bad_words", "min_tokens", "stop_token_ids"}),
            window=64,
        ),
        Dialect(ServerKind.OPENAI, {"top_p": 1.0}, unknown=_NOT_OPENAI),
    )
}


def detect(client: EndpointClient) -> Dialect:
    """Returns the dialect of a server from the owner of its models; OpenAI's where that is not known."""
    try:
        owner = json.loads(client.get("/v1/models"))["data"][0].get("owned_by", "")
        return DIALECTS[ServerKind(owner)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return DIALECTS[ServerKind.OPENAI]
