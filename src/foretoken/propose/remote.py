"""Drafting on another worker: a thread, a process or a Ray actor holds the proposer, this is its place in the engine.

The worker is told what was emitted as soon as it is known, and asked for a draft only where none has arrived for this
very text: while the target verifies, it drafts ahead (``ahead``). Nothing that comes out depends on what it does. One
that is gone, or takes too long, is left out from then on, and decoding goes on without drafts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from foretoken.core.checks import integer, number
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.law import PointMass
from foretoken.propose.base import Method, Observation, Proposer, Workshop
from foretoken.propose.links import Link, Lost, Process, thread
from foretoken.propose.tolerant import Tolerant
from foretoken.propose.wire import Ask, Commit, Frame, Hello, Made, Opening, Trouble, decode

_log = logging.getLogger(__name__)
_LOADING = 900.0  # seconds that a worker may take to be ready
_OURS = ("num_speculative_tokens", "control", "rejection")
_TRANSPORTS = ("process", "thread", "ray")
_ERRORS: dict[str, type[Exception]] = {"InvalidRequest": InvalidRequest, "ModelLoadError": ModelLoadError}


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """member: the configuration of what drafts there; it may need nothing of the target but its text.

    transport: "process" or "thread" on this machine, or "ray", an actor. address: of the Ray cluster ("auto" finds
    one); None starts one on this machine. resources: what the actor is to have, {"GPU": 1} or names of the cluster's
    own. ahead: rounds that are drafted before their verdicts are known. threads: cores that it computes on, None leaves
    it to torch. device: None is the target's, of "ray" what is there. timeout: seconds to wait for a draft at most.
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
                "method 'remote' needs a 'member', the speculative configuration of what drafts on the other worker, "
                f'such as {{"method": "draft_model", "model": ...}}; got {self.member!r}'
            )
        if given := [key for key in _OURS if key in self.member]:
            raise InvalidRequest(f"{', '.join(given)} belongs beside 'member', not in it: the engine decides that")
        if self.transport not in _TRANSPORTS:
            raise InvalidRequest(f"transport must be one of {', '.join(_TRANSPORTS)}, got {self.transport!r}")
        if self.transport != "ray" and (self.address is not None or self.resources is not None):
            raise InvalidRequest(f"address and resources are for transport 'ray', not {self.transport!r}")
        integer("ahead", self.ahead, 0)
        integer("threads", self.threads, 1, optional=True)
        number("timeout", self.timeout, 0.0)


@dataclass(eq=False, slots=True)
class Seat:
    """One sequence as the worker knows it. told: its tokens. budget, draft: of the round at hand.

    arrived: drafts by the length of the text that they were made behind.
    """

    serial: int
    told: int
    budget: int = 0
    draft: Draft | None = None
    arrived: dict[int, list[Made]] = field(default_factory=dict)


class Remote(Proposer):
    """The engine's side. rounds: drafts that were wanted; ready: those that had arrived before anybody asked.

    device: where the rows of drafts are wanted. Raises what the worker met while it loaded, or Lost.
    """

    name = "remote"

    def __init__(self, link: Link, device: torch.device | str = "cpu", timeout: float = 60.0) -> None:
        self.link, self.device, self.timeout = link, torch.device(device), timeout
        self.rounds = self.ready = 0
        self.lost = False
        self._seats: dict[int, Seat] = {}
        self._serials: dict[int, Seat] = {}
        self._count = 0
        message = link.receive(_LOADING)
        hello = None if message is None else decode(message)
        if isinstance(hello, Trouble):
            raise _raised(hello)
        if not isinstance(hello, Hello):
            raise Lost("the worker that is to draft did not become ready")
        self.learns, self._prefixes = hello.learns, hello.prefixes

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        drafts = [Draft.empty()] * len(contexts)
        try:
            self._drain()
            for i, draft in self._wanted(contexts, budgets).items():
                drafts[i] = draft
        except Lost as error:
            self._leave_out(error)
        return drafts

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        committed = []
        for context, observation in zip(contexts, observations, strict=True):
            seat = self._seats.get(context.id)
            if seat is not None:
                committed.append(self._commit(seat, context, observation))
        if committed:
            self._send(Frame(committed=tuple(committed)))

    def forget(self, context: Context) -> None:
        seat = self._seats.pop(context.id, None)
        if seat is not None:
            del self._serials[seat.serial]
            self._send(Frame(forgotten=(seat.serial,)))

    def close(self) -> None:
        """End the worker; it ends by itself with this object. Closing twice does nothing."""
        self.link.close()

    # asking

    def _wanted(self, contexts: Sequence[Context], budgets: Sequence[int]) -> dict[int, Draft]:
        """By the place in the batch, drafts for all who may have one."""
        opened: list[Opening] = []
        missed: list[Commit] = []
        places: dict[int, tuple[Seat, Context, int]] = {}
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            seat = self._seat(context, opened) if budget > 0 and not self.lost else None
            if seat is None:
                continue
            if seat.told < len(context.tokens):
                missed.append(Commit(seat.serial, tuple(context.tokens[seat.told :]), 0))
                seat.told = len(context.tokens)
            seat.budget = budget
            places[i] = seat, context, budget
        found = {i: self._found(*place) for i, place in places.items()}
        asked = [Ask(places[i][0].serial, places[i][2]) for i, draft in found.items() if draft is None]
        self.rounds += len(found)
        self.ready += len(found) - len(asked)
        if asked or missed:
            self.link.send(Frame(opened=tuple(opened), committed=tuple(missed), asked=tuple(asked)).encode())
        until = time.monotonic() + self.timeout
        while missing := [i for i, draft in found.items() if draft is None]:
            message = self.link.receive(max(0.001, until - time.monotonic()))
            if message is None:
                raise Lost(f"the worker that drafts gave none in {self.timeout:g} s")
            self._take(message)
            found |= {i: self._found(*places[i]) for i in missing}
        return {i: draft for i, draft in found.items() if draft is not None}

    def _seat(self, context: Context, opened: list[Opening]) -> Seat | None:
        """Its place, taken now if it has none; None where its law cannot be told."""
        seat = self._seats.get(context.id)
        if seat is None:
            opening = Opening.of(self._count, context)
            if opening is None:
                return None
            opened.append(opening)
            seat = self._seats[context.id] = self._serials[self._count] = Seat(self._count, len(context.tokens))
            self._count += 1
        return seat

    def _commit(self, seat: Seat, context: Context, observation: Observation) -> Commit:
        step, fresh = observation.step, tuple(context.tokens[seat.told :])
        own = step.draft is seat.draft and fresh == step.tokens
        over = step.finish_reason is not None
        commit = Commit(
            seat.serial, fresh, 0 if over else seat.budget, step.verdict.path if own else None, step.finish_reason
        )
        seat.told, seat.budget, seat.draft = len(context.tokens), 0, None
        seat.arrived = {length: made for length, made in seat.arrived.items() if length >= seat.told}
        return commit

    # what arrives

    def _drain(self) -> None:
        while not self.lost and (message := self.link.receive(0.0)) is not None:
            self._take(message)

    def _take(self, message: bytes) -> None:
        reply = decode(message)
        if isinstance(reply, Trouble):
            raise _raised(reply)
        for made in reply if isinstance(reply, tuple) else ():
            seat = self._serials.get(made.serial)
            if seat is not None:
                seat.arrived.setdefault(made.length, []).append(made)

    def _found(self, seat: Seat, context: Context, budget: int) -> Draft | None:
        """The draft of that budget behind this very text, if it has arrived."""
        for made in seat.arrived.get(len(context.tokens), ()):
            if made.follows(context.tokens) and made.fits(budget, self._prefixes):
                seat.draft = self._placed(made.cut(budget) if self._prefixes else made.draft)
                return seat.draft
        return None

    def _placed(self, draft: Draft) -> Draft:
        if self.device.type == "cpu" or isinstance(draft.law, PointMass):
            return draft
        return replace(draft, law=replace(draft.law, probs=draft.law.probs.to(self.device)))

    # the end of it

    def _send(self, frame: Frame) -> None:
        if not self.lost:
            try:
                self.link.send(frame.encode())
            except Lost as error:
                self._leave_out(error)

    def _leave_out(self, error: Lost) -> None:
        if not self.lost:
            _log.warning("%s; decoding goes on without drafts", error)
        self.lost = True
        self._seats.clear()
        self._serials.clear()


def _raised(trouble: Trouble) -> Exception:
    """What went wrong there, as it would have been raised here."""
    kind = _ERRORS.get(trouble.kind)
    return (
        RuntimeError(f"the worker that drafts: {trouble.kind}: {trouble.message}")
        if kind is None
        else kind(trouble.message)
    )


def connect(config: RemoteConfig, order: Mapping[str, Any]) -> Link:
    """A worker that is loading. order: what ``engine.drafting`` reads."""
    if config.transport == "thread":
        return thread(order)
    if config.transport == "process":
        return Process(order)
    from foretoken.propose.ray_link import Actor

    return Actor(order, config.address, config.resources)


def order(config: RemoteConfig, workshop: Workshop) -> dict[str, Any]:
    """What the worker needs to know, as JSON. Raises InvalidRequest for a target that has no folder."""
    if workshop.path is None:
        raise InvalidRequest("method 'remote' needs a target from a folder: its worker reads the tokenizer there")
    device = config.device or ("auto" if config.transport == "ray" else str(workshop.target.device))
    return {
        "member": config.member, "tokenizer": str(workshop.path), "vocab_size": workshop.target.vocab_size,
        "source_length": workshop.target.source_length,
        "dtype": str(workshop.target.dtype).removeprefix("torch."), "device": device, "backend": config.backend,
        "threads": config.threads, "ahead": config.ahead,
    }  # fmt: skip


def build(config: RemoteConfig, workshop: Workshop) -> Proposer:
    """Starts the worker and waits until it is ready."""
    if workshop.model is not None:
        raise InvalidRequest("method 'remote' has no 'model' of its own; name it in its 'member'")
    made = Remote(connect(config, order(config, workshop)), workshop.target.device, config.timeout)
    return Tolerant(made)


METHOD = Method(RemoteConfig, build)
