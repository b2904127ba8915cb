"""A drafting worker as a Ray actor, on this machine or on another of a cluster."""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.propose.links import PROGRAM, Arrivals, Lost, arrived


class Actor:
    """Its two directions are served at once, each in order: a message for the worker never waits for a draft."""

    def __init__(self, order: Mapping[str, Any], address: str | None, resources: Mapping[str, float] | None) -> None:
        ray = _connected(address)
        own = dict(resources or {})
        options = {"num_cpus": own.pop("CPU", 1.0), "num_gpus": own.pop("GPU", 0.0), "resources": own}
        made = ray.remote(concurrency_groups={"in": 1, "out": 1})(import_module(PROGRAM).Host)
        self._actor = made.options(**options).remote(dict(order))
        self._arrivals: Arrivals = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(ray, self._actor, self._arrivals), daemon=True)
        reader.start()
        self.close = weakref.finalize(self, _end, ray, self._actor, reader)

    def send(self, message: bytes) -> None:
        try:
            self._actor.send.options(concurrency_group="in").remote(message)
        except Exception as error:
            raise Lost(f"the actor that drafts is gone ({_first_line(error)})") from None

    def receive(self, seconds: float) -> bytes | None:
        return arrived(self._arrivals, seconds)


def _connected(address: str | None) -> Any:
    """Ray, connected. A cluster that is started for this is of this machine alone, and listens on it alone."""
    try:
        import ray
    except ImportError as error:
        raise InvalidRequest("transport 'ray' needs Ray; pip install 'foretoken[ray]'") from error
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        local: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "include_dashboard": False} if address is None else {}
        try:
            ray.init(address=address or "local", logging_level=logging.WARNING, **local)
        except Exception as error:  # Ray has no error of its own for this
            what = "no Ray could be started" if address is None else f"no Ray cluster answers at {address!r}"
            raise InvalidRequest(f"{what}: {_first_line(error)}") from None
    return ray


def _read(ray: Any, actor: Any, arrivals: Arrivals) -> None:
    """Until the actor ends: one call waits there for every message."""
    try:
        while True:
            message = ray.get(actor.receive.options(concurrency_group="out").remote())
            arrivals.put(message)
            if message is None:
                return
    except Exception:  # whatever Ray calls it, nothing more will come
        arrivals.put(None)


def _end(ray: Any, actor: Any, reader: threading.Thread) -> None:
    if ray.is_initialized():
        ray.kill(actor)
    reader.join(5.0)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
