"""The front: one address before several replicas. It forwards requests as they are, and answers as they come.

A replica that is lost takes no request with it. Where the client has nothing yet, another replica is asked. A stream
whose text depends on the request alone is told again by another replica, and goes on where it stopped. Any other stream
ends with an error event.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from foretoken import __version__
from foretoken.serve.app import open_paths
from foretoken.serve.errors import ApiError, ServerUnavailable, add_handlers
from foretoken.serve.limits import LimitsMiddleware, ServerSettings
from foretoken.serve.replicas.forwarded import Forwarded, parse
from foretoken.serve.replicas.gathered import Gathered
from foretoken.serve.replicas.relay import OUTCOMES, Relay
from foretoken.serve.stream import cancel_on_disconnect

_log = logging.getLogger(__name__)


class Replicas(Protocol):
    """Those who answer."""

    def respond(self, request: Forwarded) -> AsyncGenerator[Message, None]:
        """See ``Replica.respond``, of one of them. Raises ReplicaLost also where the replica's process ended."""
        ...

    async def metrics(self) -> Sequence[tuple[str, Any]]:
        """See ``Replica.metrics``, of all that answer; none where none does."""
        ...


class Front:
    """Requests that are on their way. ``draining``: refuse new ones. ``abandon`` ends those that are left."""

    def __init__(self, replicas: Replicas, settings: ServerSettings) -> None:
        self.draining = False
        self.failovers: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._replicas, self._settings = replicas, settings
        self._relays: set[Relay] = set()

    @property
    def busy(self) -> bool:
        """Whether any request is open."""
        return bool(self._relays)

    def abandon(self) -> None:
        """End what is still open, for shutting down."""
        for relay in list(self._relays):
            relay.end(ServerUnavailable("the server shut down before the request was done"))

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI has it. Raises ApiError, Unavailable or TimeoutError where nothing was sent yet."""
        body = await _read(receive)
        if self.draining and scope["method"] == "POST":
            raise ServerUnavailable("the server is shutting down; ask another one")
        parsed = await parse(body) if scope["method"] == "POST" else {}
        request = Forwarded.of(scope, body, parsed)
        relay = Relay(self._replicas.respond, request, parsed, send, self._settings.timeout, self.failovers)
        self._relays.add(relay)
        try:
            await cancel_on_disconnect(receive, relay.run())
        except ApiError as error:
            if error.status != 499:  # gone: nobody will read it
                raise
        finally:
            self._relays.discard(relay)

    async def health(self, request: Request) -> Response:
        """Whether requests are taken: 200 while one replica answers."""
        if self.draining:
            raise ServerUnavailable("the server is shutting down")
        if not await self._replicas.metrics():
            raise ServerUnavailable("no replica is running")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        body, kind = Gathered(dict(await self._replicas.metrics()), self.failovers).render()
        return Response(body, headers={"Content-Type": kind})


def create_front(front: Front, settings: ServerSettings) -> FastAPI:
    """Its app: keys, bodies and numbers of requests are judged here, all else by the replicas."""
    app = FastAPI(title="Foretoken", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.front = front
    add_handlers(app)
    app.add_route("/health", front.health, methods=["GET"])
    app.add_route("/metrics", front.metrics, methods=["GET"])
    app.router.default = _Forwarding(front)
    app.add_middleware(LimitsMiddleware, settings=settings, open_paths=open_paths())
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


class _Forwarding:
    """What no route of the front's own takes."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._front.forward(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})


async def _read(receive: Receive) -> bytes:
    """The whole body."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client went away")
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)
