"""Drafting on another worker: a thread, a process or a Ray actor that holds the proposer.

The engine sends emitted tokens to the worker as soon as they are known, and waits for a draft only if none has arrived
for exactly the current text: while the target verifies, the worker drafts ahead (``remote_worker``). The output does
not depend on the worker. A worker that ends or exceeds the timeout is disabled, and decoding continues without drafts.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from foretoken.core.checks import integer, number
from foretoken.core.context import Context
from foretoken.core.draft import Draft, PointMass
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.propose.base import BuildContext, Method, Observation, Proposer
from foretoken.propose.per_request import FallbackProposer
from foretoken.propose.remote_transports import (
    PROGRAM,
    Disconnected,
    EngineEndpoint,
    start_actor,
    start_process,
    start_thread,
)
from foretoken.propose.remote_wire import (
    Commit,
    DraftReply,
    EngineMessage,
    OpenSession,
    WorkerError,
    WorkerReady,
    decode,
    encode,
)

_log = logging.getLogger(__name__)

_LOAD_TIMEOUT = 900.0  # seconds that a worker may take to load
_ENGINE_KEYS = ("num_speculative_tokens", "control", "rejection")  # belong beside "member"
_TRANSPORTS = ("process", "thread", "ray")
_ERRORS: dict[str, type[Exception]] = {"InvalidRequest": InvalidRequest, "ModelLoadError": ModelLoadError}


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """Configuration of the method ``remote``."""

    # speculative configuration of the worker's proposer, which may use nothing of the target but its text
    member: Mapping[str, Any] | None = None
    transport: str = "process"  # "process" or "thread" on this machine, or "ray" for an actor
    address: str | None = None  # address of the Ray cluster ("auto" finds one); None starts one on this machine
    # resources of the Ray actor: {"GPU": 1}, or names of custom resources of the cluster
    resources: Mapping[str, float] | None = None
    ahead: int = 1  # decode steps that are drafted before their verdicts are known
    threads: int | None = None  # CPU threads of the worker; None keeps torch's default
    device: str | None = None  # device of the worker; None is the target's device, with "ray" the actor's default
    backend: str = "auto"  # backend of the worker's model
    timeout: float = 60.0  # maximum seconds to wait for a draft

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


def start_worker(config: RemoteConfig, build_context: BuildContext) -> EngineEndpoint:
    """Starts a worker and returns the engine's endpoint while it loads.

    Raises:
        InvalidRequest: The target has no folder, or the transport is not available here.
        Disconnected: The worker ended at once.
    """
    if build_context.path is None:
        raise InvalidRequest("method 'remote' needs a target from a folder: its worker reads the tokenizer there")
    target = build_context.target
    device = config.device or ("auto" if config.transport == "ray" else str(target.device))
    worker_config = {
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
    if config.transport == "thread":
        endpoint = start_thread(import_module(PROGRAM).serve)
    elif config.transport == "process":
        endpoint = start_process()
    else:
        endpoint = start_actor(config.address, config.resources)
    endpoint.send(json.dumps(worker_config).encode())
    return endpoint


def build(config: RemoteConfig, build_context: BuildContext) -> Proposer:
    """Starts the worker, waits until it is ready, and falls back to plain decoding if it fails."""
    if build_context.model is not None:
        raise InvalidRequest("method 'remote' has no 'model' of its own; name it in its 'member'")
    remote = Remote(start_worker(config, build_context), build_context.target.device, config.timeout)
    return FallbackProposer(remote, build_context.target.vocab_size)


METHOD = Method(RemoteConfig, build)


@dataclass(eq=False, slots=True)
class RemoteSession:
    """The engine's record of one drafting session."""

    session_id: int
    sent: int  # number of tokens that the worker has received
    budget: int = 0  # draft tokens allowed in the current step
    draft: Draft | None = None  # the draft used in the current step
    arrived: list[DraftReply] = field(default_factory=list)  # received drafts that may still be used


class Remote(Proposer):
    """Proposer that sends sequences to a drafting worker and receives drafts.

    Attributes:
        drafts_needed: Number of drafts that decode steps needed.
        drafts_ready: Number of those that had arrived before the step began.
        lost: The worker is disabled.
    """

    name = "remote"

    def __init__(self, endpoint: EngineEndpoint, device: torch.device | str = "cpu", timeout: float = 60.0) -> None:
        """Waits until the worker has loaded.

        Args:
            device: Device that the drafts' distributions are moved to.
            timeout: Maximum seconds to wait for a draft.

        Raises:
            Disconnected: The worker did not become ready. An exception while it loads is raised as it is.
        """
        self.endpoint, self.device, self.timeout = endpoint, torch.device(device), timeout
        self.drafts_needed = self.drafts_ready = 0
        self.lost = False
        self._sessions: dict[int, RemoteSession] = {}  # by context id
        self._count = 0
        message = endpoint.receive(_LOAD_TIMEOUT)
        ready = None if message is None else decode(message)
        if isinstance(ready, WorkerError):
            raise _as_exception(ready)
        if not isinstance(ready, WorkerReady):
            raise Disconnected("the drafting worker did not become ready")
        self.learns, self._prefixes = ready.learns, ready.prefixes

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        drafts = [Draft.empty()] * len(contexts)
        try:
            while not self.lost and (message := self.endpoint.receive(0.0)) is not None:
                self._accept(message)
            for i, draft in self._collect(contexts, budgets).items():
                drafts[i] = draft
        except Disconnected as error:
            self._disable(error)
        return drafts

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        committed = []
        for context, observation in zip(contexts, observations, strict=True):
            session = self._sessions.get(context.id)
            if session is not None:
                committed.append(self._commit(session, context, observation))
        if committed:
            self._send(EngineMessage(committed=tuple(committed)))

    def forget(self, context: Context) -> None:
        session = self._sessions.pop(context.id, None)
        if session is not None:
            self._send(EngineMessage(closed=(session.session_id,)))

    def close(self) -> None:
        """Ends the worker, as deleting this object does. A second call does nothing."""
        self.endpoint.close()

    def _collect(self, contexts: Sequence[Context], budgets: Sequence[int]) -> dict[int, Draft]:
        """Returns drafts by index in the batch: arrived ones, and the others when the worker has made them."""
        opened: list[OpenSession] = []
        commits: list[Commit] = []
        drafts: dict[int, Draft] = {}
        waiting: dict[int, tuple[RemoteSession, Context]] = {}
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            session = self._session(context, opened) if budget > 0 and not self.lost else None
            if session is None:
                continue
            unsent, session.sent, session.budget = context.tokens[session.sent :], len(context.tokens), budget
            draft = self._arrived_draft(session, context)
            if draft is None:
                waiting[i] = session, context
                commits.append(Commit(session.session_id, tuple(unsent), budget, requested=True))
            else:
                drafts[i] = draft
                if unsent:
                    commits.append(Commit(session.session_id, tuple(unsent), 0))
        self.drafts_needed += len(drafts) + len(waiting)
        self.drafts_ready += len(drafts)
        if commits:
            self.endpoint.send(encode(EngineMessage(opened=tuple(opened), committed=tuple(commits))))
        deadline = time.monotonic() + self.timeout
        while missing := waiting.keys() - drafts.keys():
            message = self.endpoint.receive(max(0.001, deadline - time.monotonic()))
            if message is None:
                raise Disconnected(f"the drafting worker gave none in {self.timeout:g} s")
            self._accept(message)
            found = {i: self._arrived_draft(*waiting[i]) for i in missing}
            drafts |= {i: draft for i, draft in found.items() if draft is not None}
        return drafts

    def _session(self, context: Context, opened: list[OpenSession]) -> RemoteSession | None:
        """Returns the session of ``context``, opened if needed; None if its distribution cannot be sent."""
        session = self._sessions.get(context.id)
        if session is None:
            message = OpenSession.of(self._count, context)
            if message is None:
                return None
            opened.append(message)
            session = self._sessions[context.id] = RemoteSession(self._count, len(context.tokens))
            self._count += 1
        return session

    def _commit(self, session: RemoteSession, context: Context, observation: Observation) -> Commit:
        step, new = observation.step, tuple(context.tokens[session.sent :])
        verified = step.draft is session.draft and new == step.tokens
        finished = step.finish_reason is not None
        commit = Commit(
            session.session_id,
            new,
            0 if finished else session.budget,
            step.verdict.path if verified else None,
            step.finish_reason,
        )
        session.sent, session.budget, session.draft = len(context.tokens), 0, None
        session.arrived = [reply for reply in session.arrived if reply.length >= session.sent]
        return commit

    def _accept(self, message: bytes) -> None:
        """Files the drafts of a message. Raises an exception of the worker."""
        replies = decode(message)
        if isinstance(replies, WorkerError):
            raise _as_exception(replies)
        sessions = {session.session_id: session for session in self._sessions.values()}
        for reply in replies:
            if reply.session_id in sessions:
                sessions[reply.session_id].arrived.append(reply)

    def _arrived_draft(self, session: RemoteSession, context: Context) -> Draft | None:
        """Returns the draft of the session's budget for exactly the current text, or None if it has not arrived."""
        for reply in session.arrived:
            if reply.follows(context.tokens) and reply.fits(session.budget, self._prefixes):
                session.draft = self._to_device(reply.cut(session.budget) if self._prefixes else reply.draft)
                return session.draft
        return None

    def _to_device(self, draft: Draft) -> Draft:
        if self.device.type == "cpu" or isinstance(draft.law, PointMass):
            return draft
        return replace(draft, law=replace(draft.law, probs=draft.law.probs.to(self.device)))

    def _send(self, message: EngineMessage) -> None:
        if not self.lost:
            try:
                self.endpoint.send(encode(message))
            except Disconnected as error:
                self._disable(error)

    def _disable(self, error: Disconnected) -> None:
        if not self.lost:
            _log.warning("%s; decoding continues without drafts", error)
        self.lost = True
        self._sessions.clear()


def _as_exception(error: WorkerError) -> Exception:
    """Returns the worker's exception with the class that it had there; a RuntimeError for other classes."""
    kind = _ERRORS.get(error.kind)
    return RuntimeError(f"the drafting worker: {error.kind}: {error.message}") if kind is None else kind(error.message)
