"""Drafting on another worker: a thread, a process or a Ray actor that holds the proposer.

The engine sends emitted tokens to the worker as soon as they are known, and waits for a draft only if none has arrived
for exactly the current text: while the target verifies, the worker drafts ahead (``ahead``). The output does not depend
on the worker. A worker that has ended, or exceeds the timeout, is left out from then on, and decoding continues without
drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.core.checks import integer, number
from foretoken.core.errors import InvalidRequest
from foretoken.propose.base import BuildContext, Method, Proposer
from foretoken.propose.fallback import FallbackProposer
from foretoken.propose.remote_proposer import Remote
from foretoken.propose.transports import EngineEndpoint, ProcessTransport, thread_transport

_ENGINE_KEYS = ("num_speculative_tokens", "control", "rejection")  # belong beside "member"
_TRANSPORTS = ("process", "thread", "ray")


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """Where the drafting worker runs and what it drafts with.

    Attributes:
        member: Speculative configuration of the worker's proposer, which may use nothing of the target but its text.
        transport: "process" or "thread" on this machine, or "ray" for an actor.
        address: Address of the Ray cluster ("auto" finds one). None starts one on this machine.
        resources: Resources of the Ray actor: {"GPU": 1}, or names of custom resources of the cluster.
        ahead: Decode steps that are drafted before their verdicts are known.
        threads: CPU threads of the worker. None keeps torch's default.
        device: Device of the worker. None is the target's device, with "ray" whatever the actor has.
        backend: Backend of the worker's model.
        timeout: Maximum seconds to wait for a draft.
    """

    member: Mapping[str, Any] | None = None
    transport: str = "process"
    address: str | None = None
    resources: Mapping[str, float] | None = None
    ahead: int = 1
    threads: int | None = None
    device: str | None = None
    backend: str = "auto"
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.member, Mapping):
            raise InvalidRequest(
                "method 'remote' needs a 'member', the speculative configuration of the other worker's proposer, "
                f'such as {{"method": "draft_model", "model": ...}}; got {self.member!r}'
            )
        if misplaced := [key for key in _ENGINE_KEYS if key in self.member]:
            raise InvalidRequest(f"{', '.join(misplaced)} belongs beside 'member', not in it: the engine decides that")
        if self.transport not in _TRANSPORTS:
            raise InvalidRequest(f"transport must be one of {', '.join(_TRANSPORTS)}, got {self.transport!r}")
        if self.transport != "ray" and (self.address is not None or self.resources is not None):
            raise InvalidRequest(f"address and resources are for transport 'ray', not {self.transport!r}")
        integer("ahead", self.ahead, 0)
        integer("threads", self.threads, 1, optional=True)
        number("timeout", self.timeout, 0.0)


def start_worker(config: RemoteConfig, worker: Mapping[str, Any]) -> EngineEndpoint:
    """Starts a worker and returns the engine's endpoint while it loads.

    Args:
        worker: What it loads, see ``worker_config``.
    """
    if config.transport == "thread":
        return thread_transport(worker)
    if config.transport == "process":
        return ProcessTransport(worker)
    from foretoken.propose.ray_transport import RayTransport

    return RayTransport(worker, config.address, config.resources)


def worker_config(config: RemoteConfig, build_context: BuildContext) -> dict[str, Any]:
    """Returns what ``engine.drafting`` reads, as JSON. Raises InvalidRequest for a target that has no folder."""
    if build_context.path is None:
        raise InvalidRequest("method 'remote' needs a target from a folder: its worker reads the tokenizer there")
    target = build_context.target
    device = config.device or ("auto" if config.transport == "ray" else str(target.device))
    return {
        "member": config.member,
        "tokenizer": str(build_context.path),
        "vocab_size": target.vocab_size,
        "source_length": target.source_length,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": device,
        "backend": config.backend,
        "threads": config.threads,
        "ahead": config.ahead,
    }


def build(config: RemoteConfig, build_context: BuildContext) -> Proposer:
    """Starts the worker, waits until it is ready, and falls back to plain decoding if it fails."""
    if build_context.model is not None:
        raise InvalidRequest("method 'remote' has no 'model' of its own; name it in its 'member'")
    endpoint = start_worker(config, worker_config(config, build_context))
    remote = Remote(endpoint, build_context.target.device, config.timeout)
    return FallbackProposer(remote, build_context.target.vocab_size)


METHOD = Method(RemoteConfig, build)
