"""``foretoken serve --replicas``: the same API over several engines on Ray Serve."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from foretoken.cli.grouped import option
from foretoken.cli.theme import ColorMode, console, waiting
from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.serve.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from foretoken.serve.request_log import RequestTracer
    from foretoken.serve.server import Servable


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Engines behind one address."""

    replicas: int | None = option(None, "Engines behind this address, on Ray Serve. [one, in this process]", min=1)
    max_replicas: int | None = option(None, "Start up to this many under load. [--replicas]", min=1)
    address: str | None = option(
        None, "Ray cluster for replicas, such as auto or HOST:6379. [one of its own]", "--ray-address"
    )
    cpus: float | None = option(None, "Cores of each replica. [a fair share]", "--replica-cpus")
    gpus: float | None = option(None, "GPUs of each replica. [none]", "--replica-gpus", min=0)

    def scale(self) -> dict[str, Any] | None:
        """Returns arguments of ``ReplicaScale``, None without replicas. Raises InvalidRequest for contradictions."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if self.replicas is None:
            if given:
                raise InvalidRequest("--max-replicas, --ray-address, --replica-cpus and --replica-gpus need --replicas")
            return None
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidRequest(f"--max-replicas ({self.max_replicas}) must be at least --replicas ({self.replicas})")
        return given


@contextmanager
def replicas_app(
    engine: dict[str, Any],
    scale: dict[str, Any],
    settings: ServerSettings,
    tracer: RequestTracer | None,
    verbose: bool,
    drain_timeout: float,
) -> Iterator[tuple[FastAPI, Sequence[Servable]]]:
    """Starts replicas, yields the app and its one worker in front of them, and ends them.

    Args:
        engine: Arguments of ``ReplicaConfig``.
        scale: Arguments of ``ReplicaScale``.
        settings: Settings of the server.
        tracer: Traces requests.
        verbose: Whether Ray's own messages are shown.
        drain_timeout: Seconds that running requests have to finish.
    """
    deploy = _deploying(alone="address" not in scale)
    from foretoken.serve.replicas.cluster import ReplicaScale
    from foretoken.serve.replicas.front import Front, create_front
    from foretoken.serve.replicas.replica import ReplicaConfig

    made, size = ReplicaConfig(**engine, settings=settings, created=int(time.time())), ReplicaScale(**scale)
    spinner = waiting(console(ColorMode.AUTO, stderr=True), f"starting {size.replicas} replicas", silent=True)
    with deploy.replicas(made, size, drain_timeout, spinner, verbose) as answering:
        settings = replace(settings, max_concurrency=size.ceiling * made.max_requests)
        front = Front(answering, settings)
        yield create_front(front, settings, tracer), [front]


def _deploying(alone: bool) -> ModuleType:
    """Imports ``foretoken.serve.replicas.deploy``. Raises ForetokenError if Ray is missing.

    ``alone`` is whether Ray gets a private cluster.
    """
    from foretoken.serve.replicas.cluster import keep_to_itself

    if alone:
        keep_to_itself()
    try:
        from foretoken.serve.replicas import deploy
    except ImportError as error:
        raise ForetokenError(
            f"replicas need packages that are not installed ({error.name}); pip install 'foretoken[ray]'"
        ) from error
    return deploy
