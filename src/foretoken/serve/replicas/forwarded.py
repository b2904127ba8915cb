"""A request that the front forwards to a replica, and the front's view of its body."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from foretoken.core.errors import ForetokenError
from foretoken.serve.errors import ApiError
from foretoken.serve.json_body import read
from foretoken.serve.limits import effective_salt, identified
from foretoken.serve.request_ids import HEADER, request_id

BLOCK = 256  # characters; about the 64 tokens of a KV block
BLOCKS = 128  # maximum number that is compared

_KEPT = (
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
)


@dataclass(eq=False)
class ReplicaLost(ForetokenError):
    """A replica or its engine ended before it had answered. ``replica`` is its name, if known."""

    message: str
    replica: str = ""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Forwarded:
    """A request as a replica receives it.

    Args:
        scope: The ASGI scope, without entries of the front's own connection.
        body: The body.
        prefix_hashes: Result of ``prefix_hashes``, by which the replica is chosen.
        avoid: Names of replicas that were lost with this request.
    """

    scope: dict[str, Any]
    body: bytes = b""
    prefix_hashes: tuple[int, ...] = ()
    avoid: frozenset[str] = frozenset()

    @classmethod
    def of(cls, scope: Scope, body: bytes, parsed: Mapping[str, Any]) -> Forwarded:
        """Returns the request to forward, from the front's ASGI scope and the parsed body."""
        kept = {"type": "http", "asgi": {"version": "3.0"}, **{key: scope[key] for key in _KEPT if key in scope}}
        if identifier := request_id(scope):
            others = [(name, value) for name, value in scope["headers"] if name != HEADER.encode()]
            kept["headers"] = [*others, (HEADER.encode(), identifier.encode())]
        kept["state"] = identified(scope)
        salt = parsed.get("cache_salt")
        return cls(kept, body, prefix_hashes(parsed, effective_salt(scope, salt if isinstance(salt, str) else None)))


async def parse(body: bytes) -> dict[str, Any]:
    """Returns the parsed body; empty if it is no JSON object, which the replica will report."""
    try:
        value = await read(body)
    except ApiError:
        return {}
    return value if isinstance(value, dict) else {}


def prefix_hashes(body: Mapping[str, Any], cache_salt: str | None = None) -> tuple[int, ...]:
    """Returns a hash of each prefix of the prompt that ends with a block, together with the salt and the model's name.

    Two prompts share as many hashes as they share leading blocks. Valid within this process.
    """
    text, hashes, model = _prompt(body), list[int](), body.get("model")
    last = hash((cache_salt, model if isinstance(model, str) else None))  # adapters have names, and share no cache
    for end in range(BLOCK, min(len(text), BLOCK * BLOCKS) + 1, BLOCK):
        last = hash((last, text[end - BLOCK : end]))
        hashes.append(last)
    return tuple(hashes)


def _prompt(body: Mapping[str, Any]) -> str:
    """Returns the first prompt as text. Tools and instructions come before messages, as in chat templates."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return ",".join(map(str, prompt[: BLOCK * BLOCKS]))
    if isinstance(prompt, str):
        return prompt
    before = [body.get("tools"), body.get("instructions"), body.get("system")]
    messages = body.get("messages", body.get("input"))
    return "" if messages is None else json.dumps([*filter(None, before), messages])


def repeatable(body: Mapping[str, Any]) -> bool:
    """Returns whether another replica would stream the same text, and only text.

    True for greedy decoding and the trajectory grade, where the text depends on the request alone. False with tool
    calls, whose identifiers differ, and with log-probabilities and steps, whose chunks differ.
    """
    grade = body.get("exactness")
    greedy = body.get("temperature") == 0 and grade != "lossy-typical"
    seeded = body.get("seed") is not None and grade in (None, "trajectory")
    logprobs = body.get("logprobs")
    plain = (logprobs is None or logprobs is False) and not (body.get("tools") or body.get("return_steps"))
    return (greedy or seeded) and plain
