"""Requests that the front forwards, and the choice of their replicas.

The replica with the longest prefix-cache hit is chosen, unless it is much busier: only replicas within ``slack``
requests of the least busy one are compared by their hits.
"""

import json
import random
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.types import Scope

from foretoken.core.errors import ForetokenError
from foretoken.serve.request_state import HEADER, STATE, state_of

BLOCK = 256  # characters; about the 64 tokens of a KV block
BLOCKS = 128  # maximum number that is compared

_KEPT = (
    *("http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server"),
)

R = TypeVar("R", bound=Hashable)
REMEMBERED = 65_536  # latest blocks of prompts; about 16 million characters


@dataclass(eq=False)
class ReplicaLost(ForetokenError):
    """A replica or its engine ended before it had answered. ``replica`` is its name, if known."""

    message: str
    replica: str = ""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Forwarded:
    """A request as a replica receives it."""

    scope: dict[str, Any]  # the ASGI scope, without entries of the front's own connection
    body: bytes = b""  # the body
    prefix_hashes: tuple[int, ...] = ()  # result of ``prefix_hashes``, by which the replica is chosen
    avoid: frozenset[str] = frozenset()  # names of replicas that were lost with this request

    @classmethod
    def of(cls, scope: Scope, body: bytes, parsed: Mapping[str, Any]) -> "Forwarded":
        """Returns the request to forward, from the front's ASGI scope and the parsed body."""
        kept = {"type": "http", "asgi": {"version": "3.0"}, **{key: scope[key] for key in _KEPT if key in scope}}
        state = state_of(scope)
        if state.id:
            others = [(name, value) for name, value in scope["headers"] if name != HEADER.encode()]
            kept["headers"] = [*others, (HEADER.encode(), state.id.encode())]
        kept["state"] = {STATE: replace(state, reporter=None, unknown_fields=[])}
        salt = parsed.get("cache_salt")
        return cls(kept, body, prefix_hashes(parsed, state.effective_salt(salt if isinstance(salt, str) else None)))


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


class PrefilledBlocks:
    """Remembers which replicas prefilled which blocks of prompts. A block is a hash of ``forwarded.prefix_hashes``."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._replicas: OrderedDict[int, set[Hashable]] = OrderedDict()  # the latest block last

    def note(self, prefix_hashes: Sequence[int], replica: Hashable) -> None:
        """Records that ``replica`` prefills a prompt with these blocks."""
        for block in prefix_hashes:
            self._replicas.setdefault(block, set()).add(replica)
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._remembered:
            self._replicas.popitem(last=False)

    def known(self, prefix_hashes: Sequence[int], replica: Hashable) -> int:
        """Returns the number of leading blocks that the replica has prefilled."""
        for count, block in enumerate(prefix_hashes):
            if replica not in self._replicas.get(block, ()):
                return count
        return len(prefix_hashes)

    def forget(self, replica: Hashable) -> None:
        for replicas in self._replicas.values():
            replicas.discard(replica)


def ranked(load: Mapping[R, int], known: Mapping[R, int], slack: int) -> list[R]:
    """Returns replicas, the best first.

    ``load`` is the number of requests of each, ``known`` the number of the prompt's blocks that each has prefilled.
    """
    lowest = min(load.values(), default=0)

    def key(replica: R) -> tuple[bool, int, int, float]:
        far = load[replica] > lowest + slack
        return far, 0 if far else -known[replica], load[replica], random.random()

    return sorted(load, key=key)


class ReplicaLoad:
    """Counts the running requests of each replica. Thread-safe."""

    def __init__(self) -> None:
        self._open: defaultdict[Hashable, set[str]] = defaultdict(set)

    def add(self, replica: Hashable, request: str) -> None:
        self._open[replica].add(request)

    def remove(self, replica: Hashable, request: str) -> None:
        self._open[replica].discard(request)

    def load(self, replica: Hashable) -> int:
        return len(self._open.get(replica, ()))

    def forget(self, replica: Hashable) -> None:
        self._open.pop(replica, None)
