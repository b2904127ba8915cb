"""Facts about a request in the state of its ASGI scope: identifier, unknown fields, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_ANTHROPIC_HEADER = "request-id"  # Anthropic's clients read this one
_UNKNOWN_FIELDS_HEADER = "x-unknown-fields"
_REQUEST_ID = re.compile("[!-~]{1,128}")

# keys of the state of an ASGI scope
_ID, _SUMMARY = "request_id", "summary"

_MAX_NAMES = 10  # unknown fields in the header
_MAX_NAME_LENGTH = 60  # characters of each

_names: ContextVar[list[str] | None] = ContextVar("unknown_fields", default=None)


def new_request_id() -> str:
    """Returns a new identifier."""
    return f"req_{uuid4().hex}"


def request_id(scope: Scope) -> str | None:
    """Returns the identifier of a request that has passed the middleware."""
    identifier: str | None = scope.get("state", {}).get(_ID)
    return identifier


def set_request_id(scope: Scope, identifier: str) -> None:
    """Makes ``identifier`` the request's, where the client put one into the body and none into a header."""
    if not scope["state"].get("request_id_given"):
        scope["state"][_ID] = identifier


class RequestIdMiddleware:
    """ASGI middleware. Also passes the identifier on to replicas, and adds the header about unknown fields."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent_id = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"").decode("latin-1")
        fits = _REQUEST_ID.fullmatch(sent_id) is not None
        state = scope.setdefault("state", {})
        state.update({_ID: sent_id if fits else new_request_id(), "request_id_given": fits})

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = state[_ID]
                if scope["path"].startswith("/v1/messages"):
                    headers[_ANTHROPIC_HEADER] = state[_ID]
                if names := state.get("unknown_fields"):
                    headers[_UNKNOWN_FIELDS_HEADER] = unknown_fields_header(names)
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


def report_summary(scope: Scope, source: Callable[[], RequestSummary | None]) -> None:
    """Registers ``source`` as the reporter of the request's outcome so far."""
    scope.setdefault("state", {})[_SUMMARY] = source


def summary_of(scope: Scope) -> RequestSummary | None:
    """Returns the outcome of a request; None if it generates nothing, or was refused."""
    source: Callable[[], RequestSummary | None] | None = scope.get("state", {}).get(_SUMMARY)
    return None if source is None else source()
