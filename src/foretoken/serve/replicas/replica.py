"""One replica: an engine with its worker and app, as a process of its own that is handed requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.core import Metric
from starlette.types import Message

from foretoken.core.streams import SeedDomain, derived_seed
from foretoken.llm import LLM
from foretoken.serve.app import create_app
from foretoken.serve.limits import ServerSettings
from foretoken.serve.replicas.forwarded import Forwarded, ReplicaLost
from foretoken.serve.worker import Worker

_log = logging.getLogger(__name__)

_NO_BOUND = 2**31  # the front counts requests


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """How a replica is made. options: of ``LLM``. created: when the model began to be served, in Unix seconds."""

    model: str | None = None
    draft_model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: ServerSettings = field(default_factory=ServerSettings)
    max_waiting: int = 256
    created: int = 0

    @property
    def seats(self) -> int:
        """Sequences that share a pass."""
        return int(self.options.get("max_num_seqs", 16))

    @property
    def max_requests(self) -> int:
        """Sequences that may be in work or wait."""
        return self.seats + self.max_waiting


class Replica:
    """Answers what the front forwards. ``name`` tells it from the others.

    Its app is the server's own, so that answers are the same byte for byte; keys are checked here again, but pages of
    other origins are the front's concern.
    """

    def __init__(self, engine: ReplicaConfig, name: str | None = None) -> None:
        self.name = name or _own_name()
        options = {**engine.options, "seed": _seed(engine.options.get("seed", 0), self.name)}
        self.worker = Worker(LLM(engine.model, engine.draft_model, **options), max_waiting=engine.max_waiting)
        settings = replace(engine.settings, origins=(), max_concurrency=_NO_BOUND)
        self._app = create_app(self.worker, settings)
        self._service = self._app.state.service
        self._service.created = engine.created
        self.worker.start()

    async def respond(self, request: Forwarded) -> AsyncIterator[Message]:
        """ASGI's messages of the answer, the first with the replica's name. Closed early, the request is cancelled.

        Raises ReplicaLost once the engine is dead: what the app says of that is not the answer to the request.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        answering = asyncio.create_task(self._answer(request, messages))
        try:
            while (message := await messages.get()) is not None:
                if self.worker.dead is not None:
                    raise ReplicaLost(f"the engine stopped working ({self.worker.dead})", self.name)
                yield {**message, "replica": self.name}
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def metrics(self) -> tuple[str, list[Metric]]:
        """Its name, and all that Prometheus is told of it. Raises ReplicaLost once the engine is dead."""
        await self.check_health()
        return self.name, list(self._service.metrics.collect())

    async def check_health(self) -> None:
        """Ray Serve replaces a replica where this raises."""
        if not self.worker.alive:
            raise ReplicaLost("the engine is not running", self.name)

    async def _answer(self, request: Forwarded, messages: asyncio.Queue[Message | None]) -> None:
        unread = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await asyncio.Event().wait()  # that the client went away is told by cancelling
            raise AssertionError

        try:
            await self._app(dict(request.scope), receive, messages.put)
        except Exception:
            _log.exception("a request failed")  # the app has answered it before it raised
        finally:
            messages.put_nowait(None)


def _own_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_tag)


def _seed(seed: int, name: str) -> int:
    """Another for each replica: requests without a seed of their own must not draw the same numbers side by side."""
    return derived_seed(SeedDomain.REPLICA, seed, name)
