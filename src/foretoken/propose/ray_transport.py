"""A drafting worker as a Ray actor, on this machine or on another node of a cluster."""

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
from foretoken.propose.transports import PROGRAM, MessageQueue, WorkerLost, next_message


class RayTransport:
    """The engine's endpoint of a Ray actor.

    Each direction has a concurrency group of its own, in order: a message to the worker never waits for a draft.
    """

    def __init__(self, config: Mapping[str, Any], address: str | None, resources: Mapping[str, float] | None) -> None:
        ray = _connected(address)
        remaining = dict(resources or {})
        options = {"num_cpus": remaining.pop("CPU", 1.0), "num_gpus": remaining.pop("GPU", 0.0), "resources": remaining}
        actor_class = ray.remote(concurrency_groups={"in": 1, "out": 1})(import_module(PROGRAM).Host)
        self.actor = actor_class.options(**options).remote(dict(config))
        self._messages: MessageQueue = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(ray, self.actor, self._messages), daemon=True)
        reader.start()
        self.close = weakref.finalize(self, _end, ray, self.actor, reader)

    def send(self, message: bytes) -> None:
        try:
            self.actor.send.options(concurrency_group="in").remote(message)
        except Exception as error:
            raise WorkerLost(f"the drafting actor is gone ({_first_line(error)})") from None

    def receive(self, seconds: float) -> bytes | None:
        return next_message(self._messages, seconds)


def _connected(address: str | None) -> Any:
    """Returns the ``ray`` module, connected. A cluster that this starts listens on this machine only."""
    try:
        import ray
    except ImportError as error:
        raise InvalidRequest("transport 'ray' needs Ray; pip install 'foretoken[ray]'") from error
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        local: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "include_dashboard": False} if address is None else {}
        try:
            ray.init(address=address or "local", logging_level=logging.WARNING, **local)
        except Exception as error:  # Ray has no dedicated exception type for this
            problem = "no Ray could be started" if address is None else f"no Ray cluster answers at {address!r}"
            raise InvalidRequest(f"{problem}: {_first_line(error)}") from None
    return ray


def _read(ray: Any, actor: Any, messages: MessageQueue) -> None:
    """Queues the actor's messages until it ends; a blocking call fetches each of them."""
    try:
        while True:
            message = ray.get(actor.receive.options(concurrency_group="out").remote())
            messages.put(message)
            if message is None:
                return
    except Exception:  # any error of Ray's ends the stream
        messages.put(None)


def _end(ray: Any, actor: Any, reader: threading.Thread) -> None:
    if ray.is_initialized():
        ray.kill(actor)
    reader.join(5.0)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
