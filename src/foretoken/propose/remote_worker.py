"""The drafting worker, which drafts while the target verifies (PEARL's post-verify, 2408.11850; DSI, 2405.14105).

It holds a proposer and its own copy of every sequence. After it has sent a draft it continues as if the target had
accepted all of it, predicts the target's next token, and sends the draft that follows. If the verdict agrees, the next
draft is available at once. If not, drafts that were made ahead are dropped, a useless forward pass is cancelled, and
drafting restarts after the emitted tokens.

Drafts do not depend on this. Random numbers are addressed by seed and position, so the draft after a text is the same
whenever it is made, and the engine uses a draft only for exactly its text and exactly the budget of its step: budgets
are decided before anything is sampled (non-anticipation), and a wrong prediction only wastes time. This requires a
proposer whose drafts follow from the text alone (``can_rewind``); any other proposer drafts only on request.
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import torch

from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.step import StepOutput, Timings
from foretoken.core.verdict import Verdict
from foretoken.models.base import Scores
from foretoken.models.resumable import Resumable
from foretoken.propose.base import Observation, Proposer
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.remote_transports import Disconnected, DraftEndpoint
from foretoken.propose.remote_wire import Commit, DraftReply, EngineMessage, WorkerError, WorkerReady, decode, encode

_NO_TIMINGS = Timings(0.0, 0.0, 0.0, 0.0, 1)
_NO_SCORES = Scores(torch.empty(0, 0))


class DraftCancelled(Exception):
    """Raised before a forward pass whose draft has become useless."""


@dataclass(eq=False, slots=True)
class DraftSession:
    """One sequence in the worker."""

    context: Context  # the text as the proposer knows it, which may end in predicted tokens
    committed: list[int]  # the tokens that were emitted
    # drafts that were sent, by the length of the text that they follow, a prefix of ``context``
    sent: dict[int, DraftReply] = field(default_factory=dict)
    budget: int = 0  # budget of the last decode step that allowed a draft
    requested: bool = False  # the engine waits for a draft of it
    active: bool = False  # the last step allowed a draft, so the next one probably will
    prefilled: bool = False  # the proposer has processed the whole text and has drafted
    mispredicted: bool = False  # ``context`` holds a predicted token that was not emitted

    def commit(self, commit: Commit) -> None:
        """Appends emitted tokens and compares them with the predicted ones."""
        start = len(self.committed)
        self.committed.extend(commit.tokens)
        predicted = self.context.tokens[start : len(self.committed)]
        self.mispredicted |= predicted != self.committed[start : start + len(predicted)]
        self.sent = {length: reply for length, reply in self.sent.items() if length >= len(self.committed)}
        self.budget = commit.budget or self.budget
        self.active, self.requested = commit.budget > 0, commit.requested

    def reply(self, budget: int, draft: Draft) -> DraftReply:
        """Returns the message with a draft after the proposer's text."""
        tokens = self.context.tokens
        return DraftReply(self.context.id, len(tokens), tuple(tokens[len(self.committed) :]), budget, draft)

    def ready(self, prefixes: bool) -> bool:
        """Returns whether a draft after the committed text, of the current budget, was sent."""
        reply = self.sent.get(len(self.committed))
        return reply is not None and not self.mispredicted and reply.fits(self.budget, prefixes)


class DraftingWorker:
    """Serves one engine: keeps its sequences, drafts on request and ahead of verdicts."""

    def __init__(
        self, proposer: Proposer, endpoint: DraftEndpoint, ahead: int = 1, models: Sequence[Resumable] = ()
    ) -> None:
        """Initializes the worker; ``run`` serves.

        Args:
            ahead: Decode steps that are drafted before their verdicts are known, 0 to wait for each.
            models: The proposer's models, whose passes can be cancelled and whose closed sequences can be resumed.
        """
        self.proposer, self.endpoint, self.models = proposer, endpoint, models
        self.ahead = ahead if can_rewind(proposer) else 0
        self.prefixes = drafts_prefixes(proposer)
        self._sessions: dict[int, DraftSession] = {}
        self._closed: list[DraftSession] = []
        self._in_progress: dict[int, int] = {}  # budgets of the current call to the proposer, by session id
        for model in models:
            model.before = self._check_cancelled

    @torch.inference_mode()
    def run(self) -> None:
        """Serves until the engine closes the connection."""
        with suppress(Disconnected):
            self.endpoint.send(encode(WorkerReady(self.proposer.learns, self.prefixes)))
            while True:
                self._drain()
                if not self._work():
                    self._drain(None)

    # messages

    def _drain(self, seconds: float | None = 0.0) -> None:
        """Applies the messages that have arrived. seconds: longest wait for the first one."""
        while (message := self.endpoint.receive(seconds)) is not None:
            self._apply(decode(message))
            seconds = 0.0

    def _apply(self, message: EngineMessage) -> None:
        """Updates the sessions. A proposer that drafts ahead may be in the middle of a call and is updated later."""
        for session_id in message.closed:
            session = self._sessions.pop(session_id, None)
            if session is not None:
                self._closed.append(session)
        for opening in message.opened:
            self._sessions[opening.session_id] = DraftSession(opening.context(), list(opening.tokens))
        for commit in message.committed:
            session = self._sessions[commit.session_id]
            if not self.ahead and (commit.tokens or not commit.requested):
                self._observe(session, commit)
            session.commit(commit)

    def _check_cancelled(self) -> None:
        """Called before every forward pass. Raises DraftCancelled if a message made the draft in progress useless."""
        if self.ahead and self._in_progress:
            self._drain()
            if any(self._useless(session_id, budget) for session_id, budget in self._in_progress.items()):
                raise DraftCancelled

    def _useless(self, session_id: int, budget: int) -> bool:
        session = self._sessions.get(session_id)
        if session is None or session.mispredicted:
            return True
        num_predicted = len(session.context.tokens) - len(session.committed)
        awaited = session.requested and not session.ready(self.prefixes)
        sufficient = budget == session.budget or (self.prefixes and budget > session.budget)
        return num_predicted < 0 or (awaited and (num_predicted > 0 or not sufficient))

    # scheduling

    def _work(self) -> bool:
        """Does the most urgent task. Returns whether there was any."""
        while self._closed:
            context = self._closed.pop().context
            self.proposer.forget(context)
            for model in self.models:
                model.release(context.id)
        waiting = [session for session in self._sessions.values() if self._needs_draft(session)]
        if waiting:
            self._attempt(waiting)
            return True
        extensible = [session for session in self._sessions.values() if self._can_go_ahead(session)]
        if extensible:
            self._attempt(extensible, ahead=True)
        return bool(extensible)

    def _needs_draft(self, session: DraftSession) -> bool:
        """Returns whether to draft after the committed text: the engine waits for it, or soon will."""
        expected = session.requested or bool(self.ahead and session.active and session.prefilled)
        return expected and not session.ready(self.prefixes)

    def _can_go_ahead(self, session: DraftSession) -> bool:
        last = session.sent.get(len(session.context.tokens))
        ahead = sum(length > len(session.committed) for length in session.sent)
        possible = last is not None and len(last.draft) > 0
        return session.active and not session.mispredicted and ahead < self.ahead and possible

    def _attempt(self, sessions: Sequence[DraftSession], ahead: bool = False) -> None:
        """Drafts, and goes back to the committed text if that is cancelled or fails."""
        try:
            (self._draft_ahead if ahead else self._draft)(sessions)
        except DraftCancelled:
            self._rewind(sessions)
        except Exception as error:
            self._rewind(sessions)
            if not ahead and any(session.requested for session in sessions):
                self.endpoint.send(encode(WorkerError(type(error).__name__, str(error))))
            # A predicted text may be impossible, so that an error after it means nothing for a request.
            for session in sessions:
                session.requested, session.active = session.requested and ahead, False
        finally:
            self._in_progress = {}

    def _draft(self, sessions: Sequence[DraftSession]) -> None:
        for session in sessions:
            self._sync(session)
        self._propose(sessions)

    def _draft_ahead(self, sessions: Sequence[DraftSession]) -> None:
        """Drafts after a predicted text: the last draft (the likeliest path of a tree) and one more token."""
        for session in sessions:
            last = session.sent[len(session.context.tokens)]
            self._extend(session, likely_path(last.cut(session.budget) if self.prefixes else last.draft))
        self._in_progress = {session.context.id: 1 for session in sessions}
        bonus = self.proposer.propose([_predicting(session.context) for session in sessions], [1] * len(sessions))
        extended = [(session, draft.ids) for session, draft in zip(sessions, bonus, strict=True) if len(draft)]
        for session, tokens in extended:
            self._extend(session, tokens)
        self._propose([session for session, _ in extended])

    def _propose(self, sessions: Sequence[DraftSession]) -> None:
        if not sessions:
            return
        budgets = [session.budget for session in sessions]  # messages may change them during the call
        self._in_progress = {session.context.id: budget for session, budget in zip(sessions, budgets, strict=True)}
        drafts = self.proposer.propose([session.context for session in sessions], budgets)
        self._in_progress = {}
        replies = [s.reply(budget, draft) for s, budget, draft in zip(sessions, budgets, drafts, strict=True)]
        self.endpoint.send(encode(tuple(replies)))
        for session, reply in zip(sessions, replies, strict=True):
            session.sent[reply.length] = reply
            session.prefilled |= len(reply.draft) > 0

    # the proposer's state

    def _sync(self, session: DraftSession) -> None:
        """Brings the proposer's text to the committed one."""
        if session.mispredicted or len(session.context.tokens) > len(session.committed):
            self._rewind([session])
        elif len(session.context.tokens) < len(session.committed):
            self._extend(session, session.committed[len(session.context.tokens) :])

    def _rewind(self, sessions: Sequence[DraftSession]) -> None:
        """Goes back to the committed text. A sequence that is opened again reuses its KV cache (``Resumable``)."""
        for session in sessions:
            with ExitStack() as stack:
                for model in self.models:
                    stack.enter_context(model.parked(session.context.id))
                self.proposer.forget(session.context)
            current = None if session.mispredicted else session.sent.get(len(session.committed))
            session.context.rewind(session.committed)
            session.sent = {} if current is None else {len(session.committed): current}
            session.mispredicted = False

    def _extend(self, session: DraftSession, tokens: Sequence[int]) -> None:
        """Appends tokens to the proposer's text, emitted or predicted."""
        self._observe(session, Commit(session.context.id, tuple(tokens), 0))

    def _observe(self, session: DraftSession, commit: Commit) -> None:
        """Reports a step to the proposer, with its draft if the worker's draft was verified."""
        context, tokens = session.context, commit.tokens
        position, reply = context.generated, session.sent.get(len(context.tokens))
        draft = Draft.empty() if reply is None or commit.path is None else reply.draft
        context.tokens.extend(tokens)
        verdict = Verdict(tuple(commit.path or ()), tokens[-1] if tokens else -1)
        context.finish_reason = commit.reason
        step = StepOutput(context.id, position, draft, verdict, tokens, _NO_TIMINGS, commit.reason)
        self.proposer.observe([context], [Observation(step, _NO_SCORES)])


def can_rewind(proposer: Proposer) -> bool:
    """Returns whether drafts follow from text and budget alone, so that the proposer can switch to another text."""
    return isinstance(proposer, DraftModel) and proposer.stop is None


def drafts_prefixes(proposer: Proposer) -> bool:
    """Returns whether the draft for a smaller budget is a prefix of the draft for a larger one."""
    return isinstance(proposer, DraftModel) and can_rewind(proposer) and proposer.config.tree == "chain"


def likely_path(draft: Draft) -> list[int]:
    """Returns the tokens of the path that follows the highest-ranked child at every node, down to a leaf."""
    path: list[int] = []
    node = -1
    while children := draft.children[node + 1]:
        node = max(children, key=lambda child: _weight(draft, child))
        path.append(draft.ids[node])
    return path


def _weight(draft: Draft, node: int) -> float:
    return draft.scores[node] if draft.scores is not None else draft.chance(node) or 0.0


def _predicting(context: Context) -> Context:
    """Returns a context that predicts the target's next token.

    In the trajectory grade it uses the target's own noise, otherwise it takes the likeliest token.
    """
    if context.exactness is Exactness.TRAJECTORY or context.law.greedy:
        return context
    return replace(context, law=context.law.with_temperature(0.0))
