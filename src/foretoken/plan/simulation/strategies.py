"""Speculation across workers as processes of a discrete-event simulation (SimPy): who works when, on what text.

A *tape* says of every place in the text how easily a draft's token is accepted there, so that all strategies meet the
same text. Time is in seconds. A round trip is crossed half before a pass and half after it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import simpy

from foretoken.plan.simulation.pipelines import best_window

Steps = Generator[simpy.Event, Any, Any]


class Tape:
    """Uniform numbers, one for each place in the text; a draft's token is accepted where its chance is larger."""

    def __init__(self, chances: Sequence[float], seed: int) -> None:
        self.chances, self._draw, self._drawn = chances, random.Random(seed), list[float]()

    def accepts(self, place: int, position: int) -> bool:
        """Whether the draft's token at ``place`` is accepted, the ``position``-th (from 0) since the last of the
        target's own; the last of the chances is that of all further positions.
        """
        while len(self._drawn) <= place:
            self._drawn.append(self._draw.random())
        return self._drawn[place] < self.chances[min(position, len(self.chances) - 1)]


class SimulatedRequest:
    """One request's text and the time that workers spend on it. ``tokens`` are committed; ``done`` is the end of it."""

    def __init__(self, env: simpy.Environment, tape: Tape, length: int, verifiers: int) -> None:
        self.env, self.tape, self.length = env, tape, length
        self.servers = simpy.Resource(env, capacity=verifiers)
        self.done = env.event()
        self.tokens = self.drafted = self.accepted = self.passes = 0
        self.drafting = self.verifying = 0.0

    def commit(self, tokens: int) -> None:
        """Emit; the request ends with the token that fills it."""
        self.tokens += tokens
        if self.tokens >= self.length and not self.done.triggered:
            self.done.succeed()

    def draft(self, tokens: int, step: float) -> Steps:
        """Draft that many, one after the other."""
        began = self.env.now
        yield self.env.timeout(tokens * step)
        self.drafting += self.env.now - began
        self.drafted += tokens

    def verify(self, target: float, rtt: float) -> Steps:
        """A pass on the next server that is free, over the network. What is interrupted has been worked in vain."""
        yield self.env.timeout(rtt / 2)
        with self.servers.request() as turn:
            yield turn
            began = self.env.now
            try:
                yield self.env.timeout(target)
                self.passes += 1
            finally:
                self.verifying += self.env.now - began
        yield self.env.timeout(rtt / 2)

    def agreed(self, depth: int) -> int:
        """How many of the next ``depth`` places the draft's tokens are accepted at, one after the other."""
        found = 0
        while found < depth and self.tape.accepts(self.tokens + found, found):
            found += 1
        return found


def plain(work: SimulatedRequest, target: float, draft: float, depth: int, rtt: float) -> Steps:
    """The target alone; tokens stream, so that the round trip is paid once."""
    yield work.env.timeout(rtt)
    while not work.done.triggered:
        yield from work.verify(target, 0.0)
        work.commit(1)


def sequential(work: SimulatedRequest, target: float, draft: float, depth: int, rtt: float) -> Steps:
    """SI: draft ``depth`` tokens, then wait for the pass that judges them (2211.17192)."""
    while not work.done.triggered:
        yield from work.draft(depth, draft)
        yield from work.verify(target, rtt)
        found = work.agreed(depth)
        work.accepted += found
        work.commit(found + 1)


def edge(work: SimulatedRequest, target: float, draft: float, depth: int, rtt: float) -> Steps:
    """DSD: sequential between an edge and a cloud (2511.21669), with the window that suits the round trip.

    The paper learns its window; this is the fixed one that is best on paper for the first position's chance. ``depth``
    is not asked.
    """
    chance = work.tape.chances[0]
    return sequential(work, target, draft, best_window(chance, target, draft, rtt), rtt)


def parallel(work: SimulatedRequest, target: float, draft: float, depth: int, rtt: float) -> Steps:
    """PEARL (2408.11850): ``depth`` tokens are drafted beside every pass, and both wait for each other.

    pending: drafted tokens whose first is accepted and whose others the next pass judges; 0 before anything is trusted.
    """
    pending = 0
    while not work.done.triggered:
        env = work.env
        yield env.process(work.draft(depth, draft)) & env.process(work.verify(target, rtt))
        if not pending:  # pre-verify: the pass knew the text alone, and judges the first of what was drafted beside it
            if work.tape.accepts(work.tokens, 0):
                work.accepted, pending = work.accepted + 1, 1
            work.commit(1)
            continue
        found = 0  # post-verify: the rest of the last draft, and the first of the one that was drafted beside the pass
        while found < depth and work.tape.accepts(work.tokens + found, pending + found):
            found += 1
        work.accepted += found
        pending = pending + found if found == depth else 0
        work.commit(found if pending else found + 1)


class Distributed:
    """DSI (2405.14105): drafting never waits; a pass is asked for at every restart and after every ``depth`` tokens.

    A pass over m drafted tokens tells the target's token at places 1 to m + 1 since the restart. A rejection ends the
    run: passes under way are called off, and drafting restarts behind the correction. No more passes are under way than
    servers (and network) hold; with room again, the longest draft goes. Where nothing is under way whatever is drafted
    is sent, which keeps this at least as fast as plain decoding on one server.
    """

    def __init__(self, work: SimulatedRequest, target: float, draft: float, depth: int, rtt: float) -> None:
        self.work, self.env = work, work.env
        self.target, self.step, self.depth, self.rtt = target, draft, depth, rtt
        self.room = work.servers.capacity * (1 + math.ceil(rtt / target))
        self.passes: dict[int, simpy.Process] = {}  # by the tokens they are over
        self.run = self.drafted = self.verified = self.known = self.sent = 0
        self.restarted = self.env.event()

    def restart(self) -> None:
        """A run behind the target's own token; what was drafted and asked for beyond it is in vain."""
        for each in self.passes.values():
            if each is not self.env.active_process:
                each.interrupt()
        self.passes.clear()
        self.run += 1
        self.drafted = self.verified = self.known = 0
        self.sent = -1
        self.restarted.succeed()
        self.restarted = self.env.event()
        self.send()

    def send(self) -> None:
        """Ask for a pass over all that is drafted, if a whole block is new or nothing is under way."""
        due = self.drafted // self.depth * self.depth if self.passes else self.drafted
        if due > self.sent and len(self.passes) < self.room and not self.work.done.triggered:
            self.sent = due
            self.passes[due] = self.env.process(self.verification(due, self.run))

    def verification(self, rows: int, run: int) -> Steps:
        """A pass over that many drafted tokens of that run."""
        try:
            yield from self.work.verify(self.target, self.rtt)
            yield self.env.timeout(0)  # a token drafted at this very moment is part of the draft
        except simpy.Interrupt:
            return
        if run != self.run:
            return
        del self.passes[rows]
        self.known = max(self.known, rows + 1)
        self.settle()
        if run == self.run:
            self.send()

    def settle(self) -> None:
        """Commit what is known; a place that is known before it is drafted needs no draft."""
        while self.verified < self.known and not self.work.done.triggered:
            place = self.verified
            if place < self.drafted and self.work.tape.accepts(self.work.tokens, place):
                self.verified += 1
                self.work.accepted += 1
                self.work.commit(1)
                continue
            self.work.commit(1)
            self.restart()

    def drafting(self) -> Steps:
        """One token after the other; a restart throws away the one that is being drafted."""
        while True:
            began, run = self.env.now, self.run
            yield self.env.timeout(self.step) | self.restarted
            self.work.drafting += self.env.now - began
            if run != self.run:
                continue
            self.work.drafted += 1
            self.drafted += 1
            self.settle()
            self.send()


def distributed(work: SimulatedRequest, target: float, draft: float, depth: int, rtt: float) -> Steps:
    """DSI until the text is done."""
    made = Distributed(work, target, draft, depth, rtt)
    made.restart()
    work.env.process(made.drafting())
    yield work.done


Strategy = Callable[[SimulatedRequest, float, float, int, float], Steps]
STRATEGIES: dict[str, Strategy] = {
    "plain": plain, "si": sequential, "dsi": distributed, "pearl": parallel, "dsd": edge,
}  # fmt: skip
