"""The front: one address for several replicas. It forwards requests and answers unchanged.

A lost replica fails no request whose answer has not begun: another replica is asked. A stream whose text depends on the
request alone is generated again by another replica and continues where it stopped. Any other stream ends with an error
event.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from foretoken.serve.app import HEALTH_PATHS, LIVE, create_gateway
from foretoken.serve.errors import ApiError, ServerUnavailable
from foretoken.serve.json_body import read_object
from foretoken.serve.keyring import LOAD_LORA, SPECULATION, UNLOAD_LORA
from foretoken.serve.metrics import replica_metrics
from foretoken.serve.replicas.forwarding import Forwarded
from foretoken.serve.replicas.relay import OUTCOMES, Relay
from foretoken.serve.request_log import RequestTracer
from foretoken.serve.request_state import state_of
from foretoken.serve.settings import ServerSettings
from foretoken.serve.stream import cancel_on_disconnect

_log = logging.getLogger(__name__)


class Replicas(Protocol):
    """The replicas, as the front uses them."""

    def respond(self, request: Forwarded) -> AsyncGenerator[Message, None]:
        """Runs ``Replica.respond`` on one of them. Raises ReplicaLost also if the replica's process ended."""
        ...

    async def metrics(self) -> Sequence[tuple[str, Any]]:
        """Returns ``Replica.metrics`` of all replicas that answer."""
        ...

    async def speculation(self, body: bytes | None) -> Sequence[tuple[str, int, dict[str, Any]]]:
        """Returns ``Replica.speculation`` of all replicas that answer."""
        ...


class Front:
    """Forwards requests. ``draining`` refuses new ones, and ``abandon`` ends the others."""

    def __init__(self, replicas: Replicas, settings: ServerSettings) -> None:
        self.draining = False
        self.failovers: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._replicas, self._settings = replicas, settings
        self._relays: set[Relay] = set()

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._relays)

    def abandon(self) -> None:
        """Ends unfinished requests, for shutting down."""
        for relay in list(self._relays):
            relay.end(ServerUnavailable("the server shut down before the request was done"))

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards one ASGI request. Raises ApiError, ServerUnavailable or TimeoutError if nothing was sent yet."""
        body = await Request(scope, receive).body()  # the middleware has read it, within its limits
        if self.draining and scope["method"] == "POST":
            raise ServerUnavailable("the server is shutting down; ask another one")
        if scope["path"].rstrip("/") in (LOAD_LORA, UNLOAD_LORA):
            raise ApiError(404, "replicas take their LoRA adapters at the start; give them as lora_modules there")
        parsed = await read_object(body) if scope["method"] == "POST" else {}
        request = Forwarded.of(scope, body, parsed)
        relay = Relay(self._replicas.respond, request, parsed, send, self._settings.timeout, self.failovers)
        state_of(scope).reporter = lambda: relay.summary
        self._relays.add(relay)
        try:
            await cancel_on_disconnect(receive, relay.run())
        except ApiError as error:
            if error.status != 499:  # the client disconnected
                raise
        finally:
            self._relays.discard(relay)

    async def health(self, request: Request) -> Response:
        """Tells whether requests are accepted: 200 while one replica answers."""
        if self.draining:
            raise ServerUnavailable("the server is shutting down")
        if not await self._replicas.metrics():
            raise ServerUnavailable("no replica is running")
        return JSONResponse({"status": "ok"})

    async def live(self, request: Request) -> Response:
        """Tells whether the front runs. Ray Serve restarts replicas."""
        return JSONResponse({"status": "ok"})

    async def speculation(self, request: Request) -> Response:
        """Returns or changes the speculation of all replicas. The answer is one replica's, with all states by name."""
        body = None if request.method == "GET" else await request.body()
        answers = sorted(await self._replicas.speculation(body))
        if not answers:
            raise ServerUnavailable("no replica is running")
        _, status, answer = next((result for result in answers if result[1] != 200), answers[0])
        if status == 200:
            answer = answer | {"replicas": {name: state for name, _, state in answers}}
        return JSONResponse(answer, status)

    async def metrics(self, request: Request) -> Response:
        """Returns metrics for Prometheus."""
        return replica_metrics(dict(await self._replicas.metrics()), self.failovers).render()


def create_front(front: Front, settings: ServerSettings, tracer: RequestTracer | None = None) -> FastAPI:
    """Returns the front's app. It checks keys, rates, bodies and concurrency; replicas check everything else."""
    routes = {**dict.fromkeys(HEALTH_PATHS, front.health), LIVE: front.live}
    routes |= {SPECULATION: front.speculation, "/metrics": front.metrics}
    return create_gateway(settings, tracer, routes, front.forward)
