"""Kinds of servers: their names of parameters, and how each switches speculation off for one request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from foretoken.probe.client import EndpointClient


class ServerKind(StrEnum):
    """The kinds of servers that can be audited and planned for."""

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
        plain: Fields that switch speculation off for one request, None if no field does.
        depth: Field of the draft length of one request, "" if there is none.
        endless: Fields that continue a text after an end-of-sequence token, without changing the distribution.
        token_ids: Fields that request token ids.
        scores: Whether it has vLLM's ``prompt_logprobs``.
        names: Its names of parameters, by OpenAI's or vLLM's.
        unknown: Parameters that it does not offer.
        window: Number of last tokens, the prompt's included, that penalties count; None if presence and frequency
            count the text alone and repetition counts both.
    """

    kind: str
    neutral: Mapping[str, Any]
    plain: Mapping[str, Any] | None = None
    depth: str = ""
    endless: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    token_ids: Mapping[str, Any] = field(default_factory=lambda: {"return_token_ids": True})
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


NEUTRAL: Mapping[str, Any] = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_NOT_OPENAI = frozenset({"top_k", "min_p", "repetition_penalty", "bad_words", "min_tokens", "stop_token_ids"})

DIALECTS: Mapping[str, Dialect] = {
    dialect.kind: dialect
    for dialect in (
        Dialect(
            ServerKind.FORETOKEN,
            {**NEUTRAL, "top_k": 0},
            plain={"speculative_tokens": 0},
            depth="speculative_tokens",
            scores=True,
        ),
        Dialect(ServerKind.VLLM, {**NEUTRAL, "top_k": -1}, scores=True),
        Dialect(ServerKind.SGLANG, {**NEUTRAL, "top_k": -1}, unknown=frozenset({"bad_words"})),
        Dialect(
            ServerKind.LLAMACPP,
            {"top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "top_k": 0, "typical_p": 1.0},
            plain={"speculative.n_max": 0},
            endless={},
            token_ids={},
            names={"repetition_penalty": "repeat_penalty"},
            unknown=frozenset({"bad_words", "min_tokens", "stop_token_ids"}),
            window=64,
        ),
        Dialect(ServerKind.OPENAI, {"top_p": 1.0}, endless={}, token_ids={}, unknown=_NOT_OPENAI),
    )
}


def detect(client: EndpointClient) -> Dialect:
    """Returns the dialect of a server from the owner of its models; OpenAI's if the owner is unknown."""
    try:
        owner = json.loads(client.get("/v1/models"))["data"][0].get("owned_by", "")
        return DIALECTS[ServerKind(owner)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return DIALECTS[ServerKind.OPENAI]


def reported_depth(kind: str, client: EndpointClient) -> int | None:
    """Returns the draft length that a server reports, None if it reports none. Only SGLang does."""
    if kind != ServerKind.SGLANG:
        return None
    try:
        page = client.get("/server_info") or client.get("/get_server_info")
        steps = json.loads(page).get("speculative_num_steps")
        return int(steps) if steps else None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
