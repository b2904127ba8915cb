"""Starts, calls and ends replicas on Ray Serve, and routes requests to them."""

import asyncio
import logging
import os
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from uuid import uuid4

from starlette.types import Message

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports; set before Ray is imported

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, HTTPOptions, ProxyLocation
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig

from foretoken.core.errors import ForetokenError
from foretoken.serve.replicas import ReplicaScale, share
from foretoken.serve.replicas.forwarding import Forwarded, PrefilledBlocks, ReplicaLoad, ReplicaLost, ranked
from foretoken.serve.replicas.replica import Replica, ReplicaConfig

_log = logging.getLogger(__name__)

_NAME = "Replica"
_METRICS_SECONDS = 10.0  # time limit for all replicas to return their metrics
_EXTRA_CALLS = 16  # concurrent calls of a replica beside its requests, so that a full one still returns its metrics
_HEALTH_SECONDS = 2.0  # between health checks of a replica
_UPSCALE_SECONDS, _DOWNSCALE_SECONDS = 5.0, 120.0  # for which the load must ask for more, or for fewer


class RayReplicas:
    """See ``Replicas``."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streaming = handle.options(method_name="respond", stream=True)

    async def respond(self, request: Forwarded) -> AsyncGenerator[Message, None]:
        """See ``Replicas``. Waits while all replicas are full."""
        answer: Any = self._streaming.remote(request)
        done = False
        try:
            async for message in answer:
                yield message
            done = True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ReplicaLost("a replica was stopped") from None
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, ReplicaLost) else ReplicaLost(f"a replica failed: {error}") from error
        except (RayError, RayServeException) as error:
            raise ReplicaLost(f"a replica ended ({type(error).__name__})") from error
        finally:
            if not done:
                answer.cancel()

    async def metrics(self) -> Sequence[tuple[str, Any]]:
        return await self._broadcast("metrics")

    async def speculation(self, body: bytes | None) -> Sequence[tuple[str, int, dict[str, Any]]]:
        return await self._broadcast("speculation", body)

    async def _broadcast(self, method: str, *arguments: Any) -> list[Any]:
        """Returns the results of a method of all replicas that answer in time."""
        try:
            answers = await self._handle.broadcast(method, *arguments).results_async(
                timeout_s=_METRICS_SECONDS, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError):
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]


class PrefixRouter(RequestRouter):
    """Chooses replicas. It runs in the front's process, which is their only client."""

    def initialize_state(self, slack: int = 4, max_requests: int = 32, **kwargs: Any) -> None:
        """slack: see ``forwarding.ranked``. max_requests: requests that a replica may have in work."""
        self._slack, self._max_requests = slack, max_requests
        self._prefilled, self._ledger = PrefilledBlocks(), ReplicaLoad()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas that are not full, each as its own rank; none if all are full."""
        request = None if pending_request is None else _forwarded(pending_request)
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # wait before the next try if all are full
        if request is not None and len(by_id) > 1:
            avoided = {name: r for name, r in by_id.items() if name.unique_id not in request.avoid}
            by_id = avoided or by_id
        blocks = request.prefix_hashes if request is not None else ()
        load = {name: count for name in by_id if (count := self._ledger.load(name)) < self._max_requests}
        hits = {name: self._prefilled.known(blocks, name) for name in load}
        return [[by_id[name]] for name in ranked(load, hits, self._slack)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Records the replica that a request was sent to."""
        request = _forwarded(pending_request)
        if request is not None:
            self._prefilled.note(request.prefix_hashes, replica_id)
        number = pending_request.metadata.internal_request_id
        self._ledger.add(replica_id, number)
        result.add_done_callback(lambda _: self._ledger.remove(replica_id, number))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        for gone in set(self.curr_replicas) - {replica.replica_id for replica in replicas}:
            self._prefilled.forget(gone)
            self._ledger.forget(gone)
        super().update_replicas(replicas)


def _forwarded(pending: PendingRequest) -> Forwarded | None:
    return pending.args[0] if pending.args and isinstance(pending.args[0], Forwarded) else None


@contextmanager
def replicas(
    engine: ReplicaConfig,
    scale: ReplicaScale,
    drain_timeout: float,  # seconds for a replica that is no longer needed to finish
    starting: AbstractContextManager[Any] | None = None,  # context that is left when the replicas answer
    verbose: bool = False,  # whether to show their logs
) -> Iterator[RayReplicas]:
    """Runs replicas within the ``with`` block.

    Raises:
        ForetokenError: There is no cluster, or the model cannot be loaded.
    """
    owns_ray = not ray.is_initialized()
    app = f"foretoken-{uuid4().hex[:8]}"
    try:
        with starting or nullcontext():
            if owns_ray:
                _connect(scale.address, verbose)
            logging.getLogger("ray.serve").addFilter(lambda record: verbose or record.levelno >= logging.ERROR)
            handle = _deploy(engine, scale, drain_timeout, app)
        yield RayReplicas(handle)
    finally:
        if ray.is_initialized() and not (owns_ray and scale.address is None):
            serve.delete(app)
        if owns_ray:
            ray.shutdown()  # ends a private cluster with everything that runs on it


def _connect(address: str | None, verbose: bool) -> None:
    quiet: dict[str, Any] = {"log_to_driver": verbose, "logging_level": logging.INFO if verbose else logging.ERROR}
    try:
        if address is None:
            ray.init(include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise ForetokenError(f"no Ray {where}: {error}; see docs/guides/engines.md") from error


def _deploy(engine: ReplicaConfig, scale: ReplicaScale, drain_timeout: float, app: str) -> DeploymentHandle[Any]:
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    # One more batch waits in the engine, where priorities count; the rest waits at the front for any free replica.
    max_requests = 2 * engine.max_num_seqs
    options: dict[str, Any] = {"num_replicas": scale.minimum}
    if scale.maximum > scale.minimum:
        options = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scale.minimum,
                max_replicas=scale.maximum,
                target_ongoing_requests=float(engine.max_num_seqs),
                upscale_delay_s=_UPSCALE_SECONDS,
                downscale_delay_s=_DOWNSCALE_SECONDS,
            )
        }
    deployment = serve.deployment(
        name=_NAME,
        ray_actor_options={"num_cpus": scale.cpus or share(nodes, scale.maximum), "num_gpus": scale.gpus or 0.0},
        max_ongoing_requests=max_requests + _EXTRA_CALLS,
        request_router_config={
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {"slack": max(1, engine.max_num_seqs // 4), "max_requests": max_requests},
        },
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=drain_timeout,
        max_constructor_retry_count=1,
        logging_config=LoggingConfig(enable_access_log=False),
        **options,
    )(Replica)
    # Requests come through the front, so Ray Serve needs no proxies.
    serve.start(proxy_location=ProxyLocation.Disabled, http_options=HTTPOptions(host="127.0.0.1"))
    try:
        return serve.run(deployment.bind(engine), name=app, route_prefix=None)
    except RuntimeError as error:
        raise ForetokenError(_reason(app, error)) from error


def _reason(app: str, error: Exception) -> str:
    """Returns why replicas could not start: a replica's error message, taken from Ray Serve's traceback."""
    status = serve.status().applications.get(app)
    told = [deployment.message for deployment in status.deployments.values()] if status is not None else []
    words = re.findall(r"(?:^|\s)(?:\w+\.)*\w+(?:Error|Request|Exception): (.+)$", "\n".join(told), re.MULTILINE)
    return f"the replicas could not start: {words[-1] if words else error}"
