"""A request on its way from the front to a replica, and what the front has to know of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from foretoken.core.errors import ForetokenError
from foretoken.serve.errors import ApiError
from foretoken.serve.json_body import read
from foretoken.serve.limits import effective_salt

BLOCK = 256  # characters; about the 64 tokens of a page of the prefix cache
BLOCKS = 128  # of a prompt at most are compared

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
    """A replica ended, or its engine did, before it had answered. ``replica``: its name, where that is known."""

    message: str
    replica: str = ""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Forwarded:
    """What a replica gets.

    scope: ASGI's, without what belongs to the front's own connection.
    beginnings: see the function; for whoever chooses the replica.
    avoid: names of replicas that were lost over this request.
    """

    scope: dict[str, Any]
    body: bytes = b""
    beginnings: tuple[int, ...] = ()
    avoid: frozenset[str] = frozenset()

    @classmethod
    def of(cls, scope: Scope, body: bytes, parsed: Mapping[str, Any]) -> Forwarded:
        kept = {"type": "http", "asgi": {"version": "3.0"}, **{key: scope[key] for key in _KEPT if key in scope}}
        salt = parsed.get("cache_salt")
        return cls(kept, body, beginnings(parsed, effective_salt(scope, salt if isinstance(salt, str) else None)))


async def parse(body: bytes) -> dict[str, Any]:
    """The body as far as the front looks into it. Empty where it is no JSON object: the replica will say so."""
    try:
        found = await read(body)
    except ApiError:
        return {}
    return found if isinstance(found, dict) else {}


def beginnings(body: Mapping[str, Any], cache_salt: str | None = None) -> tuple[int, ...]:
    """One hash for each leading block of the prompt, of the salt and all that comes before the block's end.

    Two prompts have as many of them in common as they have leading blocks in common. Valid within this process.
    """
    text, found, last = _prompt(body), [], hash(cache_salt)
    for end in range(BLOCK, min(len(text), BLOCK * BLOCKS) + 1, BLOCK):
        last = hash((last, text[end - BLOCK : end]))
        found.append(last)
    return tuple(found)


def _prompt(body: Mapping[str, Any]) -> str:
    """Of several prompts the first. Tools come before messages, as chat templates have it."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return ",".join(map(str, prompt[: BLOCK * BLOCKS]))
    if isinstance(prompt, str):
        return prompt
    return json.dumps([body.get("tools"), body["messages"]]) if "messages" in body else ""


def repeatable(body: Mapping[str, Any]) -> bool:
    """Whether another replica would stream the same text again, and nothing but text.

    True for the greedy law and for the trajectory grade, where a text depends on the request alone. Tool calls have
    identifiers of their own, and log-probabilities and rounds come by chunks that another replica would cut elsewhere.
    """
    grade = body.get("exactness")
    greedy = body.get("temperature") == 0 and grade != "lossy-typical"
    seeded = body.get("seed") is not None and grade in (None, "trajectory")
    logprobs = body.get("logprobs")
    plain = (logprobs is None or logprobs is False) and not (body.get("tools") or body.get("return_steps"))
    return (greedy or seeded) and plain
