"""``X-Request-Id``: every answer has the client's own, or one that is made."""

from __future__ import annotations

import re
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve import unknown_fields

HEADER = "x-request-id"
_ANTHROPIC = "request-id"  # Anthropic's clients read this one
_FITS = re.compile("[!-~]{1,128}")
_STATE = "request_id"


def new_request_id() -> str:
    """Returns a new identifier."""
    return f"req_{uuid4().hex}"


def request_id(scope: Scope) -> str | None:
    """Returns the identifier of a request that has passed the middleware."""
    identifier: str | None = scope.get("state", {}).get(_STATE)
    return identifier


def set_request_id(scope: Scope, identifier: str) -> None:
    """Makes ``identifier`` the request's, where the client put one into the body and none into a header."""
    if not scope["state"].get("request_id_given"):
        scope["state"][_STATE] = identifier


class RequestIdMiddleware:
    """ASGI middleware. Also passes the identifier on to replicas, and adds the header about unknown fields."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"").decode("latin-1")
        fits = _FITS.fullmatch(given) is not None
        state = scope.setdefault("state", {})
        state.update({_STATE: given if fits else new_request_id(), "request_id_given": fits})

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = state[_STATE]
                if scope["path"].startswith("/v1/messages"):
                    headers[_ANTHROPIC] = state[_STATE]
                if names := state.get("unknown_fields"):
                    headers[unknown_fields.HEADER.decode()] = unknown_fields.header(names).decode()
            await send(message)

        await self._app(scope, receive, sending)
