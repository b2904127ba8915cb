"""Several engines behind one API: replicas on Ray Serve, and a front that forwards requests to them.

This module has the options of replicas and the environment of a private cluster. It does not import Ray.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.checks import named
from foretoken.core.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class ReplicaScale:
    """The number of replicas and their resources: each field is an option of ``foretoken serve`` (see ``cli.grouped``).

    Args:
        replicas: Engines behind this address, on Ray Serve. [one, in this process]
        max_replicas: Start up to this many under load. [--replicas]
        address: Ray cluster for replicas, such as auto or HOST:6379. [one of its own]
        cpus: Cores of each replica. [a fair share]
        gpus: GPUs of each replica. [none]
    """

    replicas: int | None = named("--replicas", None, min=1)
    max_replicas: int | None = named("--max-replicas", None, min=1)
    address: str | None = named("--ray-address", None)
    cpus: float | None = named("--replica-cpus", None)
    gpus: float | None = named("--replica-gpus", None, min=0)

    def __post_init__(self) -> None:
        if self.replicas is None and any(value is not None for value in vars(self).values()):
            raise InvalidRequest("--max-replicas, --ray-address, --replica-cpus and --replica-gpus need --replicas")
        if self.maximum < self.minimum:
            raise InvalidRequest(f"--max-replicas ({self.max_replicas}) must be at least --replicas ({self.replicas})")
        if self.cpus is not None and self.cpus <= 0:
            raise InvalidRequest(f"--replica-cpus must be more than 0, got {self.cpus}")

    @property
    def minimum(self) -> int:
        return self.replicas or 1

    @property
    def maximum(self) -> int:
        return self.minimum if self.max_replicas is None else self.max_replicas


def share(nodes: Sequence[float], count: int) -> float:
    """Returns the largest number of cores for each of ``count`` replicas; whole cores if there are enough.

    Raises InvalidRequest if there are no cores.
    """
    sizes = {cores / k for cores in nodes for k in range(1, count + 1) if cores > 0}
    fitting = [size for size in sizes if sum(int(cores / size + 1e-9) for cores in nodes) >= count]
    if not fitting:
        raise InvalidRequest("the Ray cluster has no cores; start its nodes with some")
    best = max(fitting)
    return float(int(best)) if best >= 1 else int(best * 1e4) / 1e4  # Ray counts in ten-thousandths


def keep_to_itself() -> None:
    """Sets the environment variables of Ray's processes. To be called before Ray is imported.

    Nodes are on loopback. Some of Ray's ports listen on all addresses whatever the configuration, and would run what
    they receive, so a token protects them. Usage reports are off.
    """
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # makes 127.0.0.1 the node's address, on Linux too
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_worker_niceness="0",  # replicas keep their priority
    )
    os.environ.pop("RAY_ADDRESS", None)
