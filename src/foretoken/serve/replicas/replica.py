"""One replica: an engine with its worker and app in its own process."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.core import Metric
from starlette.types import Message, Scope

from foretoken.core.streams import SeedDomain, derived_seed
from foretoken.llm import LLM
from foretoken.serve.app import create_app
from foretoken.serve.key_file import ADMIN, METRICS
from foretoken.serve.keyring import SPECULATION
from foretoken.serve.limits import replayed
from foretoken.serve.replicas.forwarding import Forwarded, ReplicaLost
from foretoken.serve.request_state import STATE, Access, RequestState, state_of
from foretoken.serve.settings import ServerSettings
from foretoken.serve.worker import Worker

_log = logging.getLogger(__name__)

_TRUSTED = RequestState(identified=True, access=Access(scopes=frozenset({METRICS, ADMIN})))  # the front's own
_NO_BOUND = 2**31  # the front limits the number of requests


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """Arguments of a replica's ``LLM``, app and ``Worker``.

    ``options`` are further arguments of ``LLM``, ``created`` is the Unix time at which the model began to be served.
    """

    model: str | None = None
    draft_model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: ServerSettings = field(default_factory=ServerSettings)
    max_waiting: int = 256
    created: int = 0

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of sequences in one forward pass."""
        return int(self.options.get("max_num_seqs", 16))

    @property
    def max_requests(self) -> int:
        """Number of sequences that may run or wait."""
        return self.max_num_seqs + self.max_waiting


class Replica:
    """Answers the requests that the front forwards. ``name`` is unique among replicas.

    It has the server's own app, so that answers are equal byte for byte. The front checks keys, rates and CORS.
    """

    def __init__(self, engine: ReplicaConfig, name: str | None = None) -> None:
        if name is None:
            from ray import serve

            name = str(serve.get_replica_context().replica_tag)
        self.name = name
        options = {**engine.options, "seed": replica_seed(engine.options.get("seed", 0), self.name)}
        self.worker = Worker(LLM(engine.model, engine.draft_model, **options), max_waiting=engine.max_waiting)
        settings = replace(engine.settings, origins=(), key_file=None, max_concurrency=_NO_BOUND)
        self._app = create_app(self.worker, settings)
        self._service = self._app.state.service
        self._service.created = engine.created
        self.worker.start()

    async def respond(self, request: Forwarded) -> AsyncIterator[Message]:
        """Yields the ASGI messages of the answer, with the replica's name. Closing it early cancels the request.

        Raises ReplicaLost if the engine is dead, so that the app's answer must not be sent.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        state = replace(state_of(request.scope), unknown_fields=[])
        scope = {**request.scope, "state": {STATE: state}}
        answering = asyncio.create_task(self._answer(scope, request.body, messages))
        try:
            while (message := await messages.get()) is not None:
                if self.worker.dead is not None:
                    raise ReplicaLost(f"the engine stopped working ({self.worker.dead})", self.name)
                last = message["type"] == "http.response.body" and not message.get("more_body", False)
                summary = state.summary if last else None
                yield {**message, "replica": self.name, "summary": summary}
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def metrics(self) -> tuple[str, list[Metric]]:
        """Returns its name and its metrics. Raises ReplicaLost if the engine is dead."""
        await self.check_health()
        return self.name, list(self._service.metrics.collect())

    async def speculation(self, body: bytes | None) -> tuple[str, int, dict[str, Any]]:
        """Returns its name, and the status and answer of /v1/speculation. body: of a change; None only asks."""
        scope: dict[str, Any] = {
            "type": "http",
            "method": "GET" if body is None else "PATCH",
            "path": SPECULATION,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "state": {STATE: _TRUSTED},  # the front has checked the client's
        }
        messages = [message async for message in self.respond(Forwarded(scope, body or b""))]
        return self.name, messages[0]["status"], json.loads(b"".join(m.get("body", b"") for m in messages))

    async def check_health(self) -> None:
        """Raises ReplicaLost if the engine is dead. Ray Serve then replaces the replica."""
        if not self.worker.alive:
            raise ReplicaLost("the engine is not running", self.name)

    async def _answer(self, scope: Scope, body: bytes, messages: asyncio.Queue[Message | None]) -> None:
        try:
            await self._app(scope, replayed(body, _connected), messages.put)
        except Exception:
            _log.exception("a request failed")  # the app has answered it before it raised
        finally:
            messages.put_nowait(None)


async def _connected() -> Message:
    """Waits for ever: a disconnect cancels the task that answers."""
    await asyncio.Event().wait()
    raise AssertionError


def replica_seed(seed: int, name: str) -> int:
    """Returns a seed for each replica, so that requests without a seed draw different numbers on each."""
    return derived_seed(SeedDomain.REPLICA, seed, name)
