"""``foretoken serve --replicas``: the same API over several engines on Ray Serve."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from foretoken.cli.theme import ColorMode, console, waiting
from foretoken.core.errors import ForetokenError, InvalidRequest

if TYPE_CHECKING:
    from foretoken.serve.limits import ServerSettings
    from foretoken.serve.tracing import RequestTracer


def scale(
    replicas: int | None, max_replicas: int | None, ray_address: str | None, cpus: float | None, gpus: float | None
) -> dict[str, Any] | None:
    """Returns the scale, or None without replicas. Raises InvalidRequest for contradictory options."""
    options = {"max_replicas": max_replicas, "address": ray_address, "cpus": cpus, "gpus": gpus}
    given = {name: value for name, value in options.items() if value is not None}
    if given and replicas is None:
        raise InvalidRequest("--max-replicas, --ray-address, --replica-cpus and --replica-gpus need --replicas")
    if replicas is not None and max_replicas is not None and max_replicas < replicas:
        raise InvalidRequest(f"--max-replicas ({max_replicas}) must be at least --replicas ({replicas})")
    return None if replicas is None else {"replicas": replicas, **given}


def serve_replicas(
    engine: dict[str, Any],
    replica_scale: dict[str, Any],
    settings: ServerSettings,
    listening: socket.socket,
    tracer: RequestTracer | None,
    verbose: bool,
    server_options: dict[str, Any],
) -> None:
    """Starts replicas, serves until the server is told to end, and ends them.

    ``engine`` has arguments of ``ReplicaConfig``, ``replica_scale`` those of ``ReplicaScale``, and
    ``server_options`` those of ``Server``.
    """
    deploy = _deploying(alone="address" not in replica_scale)
    from foretoken.serve.replicas.front import Front, create_front
    from foretoken.serve.replicas.replica import ReplicaConfig
    from foretoken.serve.replicas.scale import ReplicaScale
    from foretoken.serve.run import Server

    made, size = ReplicaConfig(**engine, settings=settings, created=int(time.time())), ReplicaScale(**replica_scale)
    spinner = waiting(console(ColorMode.AUTO, stderr=True), f"starting {size.replicas} replicas")
    with deploy.replicas(made, size, server_options["drain_timeout"], spinner, verbose) as answering:
        settings = replace(settings, max_concurrency=size.ceiling * made.max_requests)
        front = Front(answering, settings)
        Server(create_front(front, settings, tracer), front, **server_options).run(sockets=[listening])


def _deploying(alone: bool) -> ModuleType:
    """Imports ``foretoken.serve.replicas.deploy``. Raises ForetokenError if Ray is missing.

    ``alone`` is whether Ray gets a private cluster.
    """
    from foretoken.serve.replicas.alone import keep_to_itself

    if alone:
        keep_to_itself()
    try:
        from foretoken.serve.replicas import deploy
    except ImportError as error:
        raise ForetokenError(
            f"replicas need packages that are not installed ({error.name}); pip install 'foretoken[ray]'"
        ) from error
    return deploy
