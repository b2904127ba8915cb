"""State of a request in its ASGI scope: identifier, permissions, unknown fields, and how it ended."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from foretoken.serve.key_file import GENERATE, METRICS

if TYPE_CHECKING:  # the command line imports this module, with or without the server's packages
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
STATE = "request"  # in the state of an ASGI scope
_ANTHROPIC_HEADER = "request-id"  # Anthropic's clients read this one
_UNKNOWN_FIELDS_HEADER = "x-unknown-fields"
_REQUEST_ID = re.compile("[!-~]{1,128}")

_MAX_NAMES = 10  # unknown fields in the header
_MAX_NAME_LENGTH = 60  # characters of each

_names: ContextVar[list[str] | None] = ContextVar("unknown_fields", default=None)


def new_request_id() -> str:
    return f"req_{uuid4().hex}"


@dataclass(frozen=True, kw_only=True)
class RequestSummary:
    """Outcome of one request that generates, for its log line, its trace and the rates of its key."""

    id: str  # identifier of the answer
    model: str  # name of the model in the answer
    prompt_tokens: int  # tokens of all prompts
    cached_tokens: int  # prompt tokens that were in the prefix cache
    completion_tokens: int  # generated tokens of all choices
    finish_reason: str | None  # reason of its end; None if it was cancelled or failed
    queue_seconds: float | None  # from its arrival until it was scheduled; None if it never was
    first_token_seconds: float | None  # from its arrival to its first token; None if there was none
    seconds: float  # from its arrival to its end, or until now
    method: str  # the method that drafted
    speculation: Mapping[str, Any]  # see ``SpeculationRecord.to_dict``

    @property
    def total_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Access:
    """Permissions of a request: the scopes and models of its key's record. ``name`` is None without keys."""

    name: str | None = None
    scopes: frozenset[str] = frozenset({GENERATE, METRICS})
    models: tuple[str, ...] | None = None

    def may_use(self, model: str) -> bool:
        """Returns whether the request may use a model."""
        return self.models is None or model in self.models


@dataclass
class RequestState:
    """State of one request, which middlewares, routes, the log and the trace share."""

    id: str = ""
    id_given: bool = False  # whether a header had ``id``
    identified: bool = False  # whether the next three are known
    access: Access = Access()
    key: str | None = None  # digest of its API key
    client: str | None = None  # the same, if each key has a cache of its own
    status: int | None = None  # of the answer
    trace_id: str | None = None
    unknown_fields: list[str] = field(default_factory=list)  # of its body, which were ignored
    reporter: Callable[[], RequestSummary | None] | None = None  # returns the outcome so far

    @property
    def summary(self) -> RequestSummary | None:
        """The outcome so far; None if the request generates nothing, or was refused."""
        return None if self.reporter is None else self.reporter()

    def effective_salt(self, cache_salt: str | None) -> str | None:
        """Returns the cache salt to use for ``cache_salt``: unique to the API key, if each has a cache of its own."""
        if self.client is None:
            return cache_salt
        return hashlib.sha256(json.dumps([self.client, cache_salt]).encode()).hexdigest()


def state_of(scope: Scope) -> RequestState:
    """Returns the state of the request of an ASGI scope."""
    state: RequestState = scope.setdefault("state", {}).setdefault(STATE, RequestState())
    return state


class RequestIdMiddleware:
    """ASGI middleware. Also records the status of the answer, and adds the header about unknown fields."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import MutableHeaders

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent_id = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"").decode("latin-1")
        fits = _REQUEST_ID.fullmatch(sent_id) is not None
        state = state_of(scope)
        state.id, state.id_given = sent_id if fits else new_request_id(), fits

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                state.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = state.id
                if scope["path"].startswith("/v1/messages"):
                    headers[_ANTHROPIC_HEADER] = state.id
                if state.unknown_fields:
                    headers[_UNKNOWN_FIELDS_HEADER] = unknown_fields_header(state.unknown_fields)
            await send(message)

        await self._app(scope, receive, sending)


def collect_unknown_fields(names: list[str] | None) -> None:
    """Adds unknown fields of bodies that are validated in this context to ``names``. None makes them errors."""
    _names.set(names)


def ignore_unknown_fields(names: Sequence[str]) -> bool:
    """Returns whether unknown fields of these names are ignored, and collects them if so."""
    collected = _names.get()
    if collected is not None:
        collected += names
    return collected is not None


def unknown_fields_header(names: Sequence[str]) -> str:
    """Returns the value of the header ``x-unknown-fields``."""
    unique = list(dict.fromkeys(names))
    shown = [ascii(name)[1:-1][:_MAX_NAME_LENGTH] for name in unique[:_MAX_NAMES]]
    more = [f"and {len(unique) - _MAX_NAMES} more"] if len(unique) > _MAX_NAMES else []
    return ", ".join([*shown, *more])
