"""The engine's side of drafting on another worker: a proposer that sends texts to the worker and receives drafts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.law import PointMass
from foretoken.propose.base import Observation, Proposer
from foretoken.propose.transports import EngineEndpoint, WorkerLost
from foretoken.propose.wire import (
    Commit,
    DraftReply,
    DraftRequest,
    EngineMessage,
    OpenSession,
    WorkerError,
    WorkerReady,
    decode,
)

_log = logging.getLogger(__name__)


_LOAD_TIMEOUT = 900.0  # seconds that a worker may take to load


_ERRORS: dict[str, type[Exception]] = {"InvalidRequest": InvalidRequest, "ModelLoadError": ModelLoadError}


@dataclass(eq=False, slots=True)
class RemoteSession:
    """The engine's record of one drafting session.

    Attributes:
        sent: Number of tokens that the worker has received.
        budget: Draft tokens allowed in the current step.
        draft: The draft used in the current step.
        arrived: Received drafts, by the length of the text that they follow.
    """

    session_id: int
    sent: int
    budget: int = 0
    draft: Draft | None = None
    arrived: dict[int, list[DraftReply]] = field(default_factory=dict)


class Remote(Proposer):
    """The engine's side of remote drafting.

    Attributes:
        drafts_needed: Number of drafts that decode steps needed.
        drafts_ready: Number of those that had arrived before the step began.
        lost: The worker is left out.
    """

    name = "remote"

    def __init__(self, endpoint: EngineEndpoint, device: torch.device | str = "cpu", timeout: float = 60.0) -> None:
        """Waits until the worker has loaded.

        Args:
            device: Device that the drafts' distributions are moved to.
            timeout: Maximum seconds to wait for a draft.

        Raises:
            WorkerLost: The worker did not become ready. An exception of its own while loading is raised as it is.
        """
        self.endpoint, self.device, self.timeout = endpoint, torch.device(device), timeout
        self.drafts_needed = self.drafts_ready = 0
        self.lost = False
        self._sessions: dict[int, RemoteSession] = {}  # by context id
        self._by_session_id: dict[int, RemoteSession] = {}
        self._count = 0
        message = endpoint.receive(_LOAD_TIMEOUT)
        ready = None if message is None else decode(message)
        if isinstance(ready, WorkerError):
            raise _as_exception(ready)
        if not isinstance(ready, WorkerReady):
            raise WorkerLost("the drafting worker did not become ready")
        self.learns, self._prefixes = ready.learns, ready.prefixes

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        drafts = [Draft.empty()] * len(contexts)
        try:
            self._drain()
            for i, draft in self._collect(contexts, budgets).items():
                drafts[i] = draft
        except WorkerLost as error:
            self._leave_out(error)
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
            del self._by_session_id[session.session_id]
            self._send(EngineMessage(closed=(session.session_id,)))

    def close(self) -> None:
        """Ends the worker, as deleting this object does. A second call does nothing."""
        self.endpoint.close()

    # requests

    def _collect(self, contexts: Sequence[Context], budgets: Sequence[int]) -> dict[int, Draft]:
        """Returns drafts by index in the batch: those that have arrived, and the others as the worker makes them."""
        opened: list[OpenSession] = []
        missed: list[Commit] = []
        arguments: dict[int, tuple[RemoteSession, Context, int]] = {}
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            session = self._session(context, opened) if budget > 0 and not self.lost else None
            if session is None:
                continue
            if session.sent < len(context.tokens):
                missed.append(Commit(session.session_id, tuple(context.tokens[session.sent :]), 0))
                session.sent = len(context.tokens)
            session.budget = budget
            arguments[i] = session, context, budget
        drafts = {i: self._arrived_draft(*each) for i, each in arguments.items()}
        requests = tuple(
            DraftRequest(arguments[i][0].session_id, arguments[i][2]) for i, draft in drafts.items() if draft is None
        )
        self.drafts_needed += len(drafts)
        self.drafts_ready += len(drafts) - len(requests)
        if requests or missed:
            message = EngineMessage(opened=tuple(opened), committed=tuple(missed), requested=requests)
            self.endpoint.send(message.encode())
        deadline = time.monotonic() + self.timeout
        while missing := [i for i, draft in drafts.items() if draft is None]:
            data = self.endpoint.receive(max(0.001, deadline - time.monotonic()))
            if data is None:
                raise WorkerLost(f"the drafting worker gave none in {self.timeout:g} s")
            self._accept(data)
            drafts |= {i: self._arrived_draft(*arguments[i]) for i in missing}
        return {i: draft for i, draft in drafts.items() if draft is not None}

    def _session(self, context: Context, opened: list[OpenSession]) -> RemoteSession | None:
        """Returns the session of ``context``, opened if there is none; None if its law cannot be sent."""
        session = self._sessions.get(context.id)
        if session is None:
            message = OpenSession.of(self._count, context)
            if message is None:
                return None
            opened.append(message)
            session = RemoteSession(self._count, len(context.tokens))
            self._sessions[context.id] = self._by_session_id[self._count] = session
            self._count += 1
        return session

    def _commit(self, session: RemoteSession, context: Context, observation: Observation) -> Commit:
        step, new = observation.step, tuple(context.tokens[session.sent :])
        own = step.draft is session.draft and new == step.tokens
        finished = step.finish_reason is not None
        commit = Commit(
            session.session_id,
            new,
            0 if finished else session.budget,
            step.verdict.path if own else None,
            step.finish_reason,
        )
        session.sent, session.budget, session.draft = len(context.tokens), 0, None
        session.arrived = {length: replies for length, replies in session.arrived.items() if length >= session.sent}
        return commit

    # replies

    def _drain(self) -> None:
        """Takes in every message that has arrived."""
        while not self.lost and (message := self.endpoint.receive(0.0)) is not None:
            self._accept(message)

    def _accept(self, message: bytes) -> None:
        """Files the drafts of a message. Raises an exception of the worker."""
        reply = decode(message)
        if isinstance(reply, WorkerError):
            raise _as_exception(reply)
        for each in reply if isinstance(reply, tuple) else ():
            session = self._by_session_id.get(each.session_id)
            if session is not None:
                session.arrived.setdefault(each.length, []).append(each)

    def _arrived_draft(self, session: RemoteSession, context: Context, budget: int) -> Draft | None:
        """Returns the draft of that budget for exactly the current text, or None if it has not arrived."""
        for reply in session.arrived.get(len(context.tokens), ()):
            if reply.follows(context.tokens) and reply.fits(budget, self._prefixes):
                session.draft = self._to_device(reply.cut(budget) if self._prefixes else reply.draft)
                return session.draft
        return None

    def _to_device(self, draft: Draft) -> Draft:
        if self.device.type == "cpu" or isinstance(draft.law, PointMass):
            return draft
        return replace(draft, law=replace(draft.law, probs=draft.law.probs.to(self.device)))

    # failures

    def _send(self, message: EngineMessage) -> None:
        if not self.lost:
            try:
                self.endpoint.send(message.encode())
            except WorkerLost as error:
                self._leave_out(error)

    def _leave_out(self, error: WorkerLost) -> None:
        if not self.lost:
            _log.warning("%s; decoding continues without drafts", error)
        self.lost = True
        self._sessions.clear()
        self._by_session_id.clear()


def _as_exception(error: WorkerError) -> Exception:
    """Returns the worker's exception with the class that it had there; a RuntimeError for other classes."""
    kind = _ERRORS.get(error.kind)
    return RuntimeError(f"the drafting worker: {error.kind}: {error.message}") if kind is None else kind(error.message)
