"""Strategies of speculative decoding across workers, as processes of a discrete-event simulation (SimPy).

Every position of the text has one random number, so that all strategies decode the same text.
Times are in seconds. Half of a round trip passes before a target pass, half after it. A target pass takes the same time
whatever its rows, as in the papers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import integer, number
from foretoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    import simpy


Steps = Generator[Any, Any, Any]
MAX_WINDOW = 32  # greatest draft length that ``best_window`` considers
MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Setting:
    """Workers and a text.

    acceptance: of a draft token by its position since the last token of the target's own; the last value repeats.
    """

    target: float  # seconds of a target pass
    draft: float  # seconds of a draft pass
    acceptance: tuple[float, ...]
    depth: int = 5  # tokens drafted before a target pass is requested (gamma, lookahead)
    verifiers: int = 1  # target servers; only ``dsi`` uses more than one
    rtt: float = 0.0  # seconds of a round trip between draft and target
    tokens: int = 1000  # length of the text
    seed: int = 0  # of the acceptance

    def __post_init__(self) -> None:
        number("target", self.target, 0.0)
        number("draft", self.draft, 0.0)
        number("rtt", self.rtt, 0.0)
        integer("depth", self.depth, 1)
        integer("verifiers", self.verifiers, 1)
        integer("tokens", self.tokens, 1, MAX_TOKENS)
        integer("seed", self.seed, 0)
        if not self.acceptance:
            raise InvalidRequest("acceptance must hold one chance, or one for each position, got none")
        for position, chance in enumerate(self.acceptance, 1):
            number(f"acceptance at position {position}", chance, 0.0, 1.0)
        if self.target == 0.0 or self.draft == 0.0:
            raise InvalidRequest(
                f"passes must take time, got {self.target} s of the target and {self.draft} s of the draft"
            )


def sequential_seconds(alpha: float, depth: int, target: float, draft: float, rtt: float = 0.0) -> float:
    """Sequential speculation: (g d + t + r) / (1 + a + ... + a^g) (2211.17192, with a round trip per step)."""
    return (depth * draft + target + rtt) / sum(alpha**k for k in range(depth + 1))


def best_window(alpha: float, target: float, draft: float, rtt: float = 0.0) -> int:
    """Returns the draft length from 1 to ``MAX_WINDOW`` with the fewest seconds per token."""
    return min(range(1, MAX_WINDOW + 1), key=lambda depth: sequential_seconds(alpha, depth, target, draft, rtt))


def servers_needed(target: float, draft: float, depth: int) -> int:
    """Returns SP = ceil(t / (g d)), the target servers with which no pass waits for another (2405.14105).

    Raises InvalidRequest if a pass takes no time.
    """
    if not target > 0.0 or not draft > 0.0:
        raise InvalidRequest(f"passes must take time, got {target} s of the target and {draft} s of the draft")
    return max(1, math.ceil(target / (depth * draft) - 1e-9))


class SimulatedRequest:
    """One request's text and the time that workers spend on it.

    ``tokens`` is the number of committed tokens. ``done`` is the event of its end, ``interrupt`` the exception of a
    cancelled process.
    """

    def __init__(self, env: simpy.Environment, setting: Setting) -> None:
        import simpy

        self.env, self.setting = env, setting
        self.interrupt = simpy.Interrupt
        self.servers = simpy.Resource(env, capacity=setting.verifiers)
        self.done = env.event()
        self.tokens = self.drafted = self.accepted = self.passes = 0
        self.drafting = self.verifying = 0.0
        self._random, self._tape = random.Random(setting.seed), list[float]()

    def accepts(self, place: int, position: int) -> bool:
        """Whether a draft token is accepted.

        place: Its position in the text. position: Its position since the last token of the target's own, from 0.
        """
        while len(self._tape) <= place:
            self._tape.append(self._random.random())
        rates = self.setting.acceptance
        return self._tape[place] < rates[min(position, len(rates) - 1)]

    def commit(self, tokens: int) -> None:
        """Commits ``tokens`` tokens. The request ends when it has reached its length."""
        self.tokens += tokens
        if self.tokens >= self.setting.tokens and not self.done.triggered:
            self.done.succeed()

    def draft(self, tokens: int) -> Steps:
        """Drafts ``tokens`` tokens, one after the other."""
        began = self.env.now
        yield self.env.timeout(tokens * self.setting.draft)
        self.drafting += self.env.now - began
        self.drafted += tokens

    def verify(self, rtt: float) -> Steps:
        """Runs a target pass on the next free server, over the network. The time of an interrupted pass counts."""
        yield self.env.timeout(rtt / 2)
        with self.servers.request() as turn:
            yield turn
            began = self.env.now
            try:
                yield self.env.timeout(self.setting.target)
                self.passes += 1
            finally:
                self.verifying += self.env.now - began
        yield self.env.timeout(rtt / 2)


def plain(work: SimulatedRequest) -> Steps:
    """Plain decoding. Tokens are streamed, so the round trip counts once."""
    yield work.env.timeout(work.setting.rtt)
    while not work.done.triggered:
        yield from work.verify(0.0)
        work.commit(1)


def sequential(work: SimulatedRequest, window: int = 0) -> Steps:
    """SI: drafts ``depth`` tokens, or a ``window``, then waits for the pass that verifies them (2211.17192)."""
    depth = window or work.setting.depth
    while not work.done.triggered:
        yield from work.draft(depth)
        yield from work.verify(work.setting.rtt)
        accepted = 0
        while accepted < depth and work.accepts(work.tokens + accepted, accepted):
            accepted += 1
        work.accepted += accepted
        work.commit(accepted + 1)


def edge(work: SimulatedRequest) -> Steps:
    """DSD: sequential speculation between edge and cloud (2511.21669), with a window that suits the round trip.

    The paper learns its window. Here it is the fixed one that is optimal by formula for the first position's
    acceptance. ``depth`` is ignored.
    """
    setting = work.setting
    return sequential(work, best_window(setting.acceptance[0], setting.target, setting.draft, setting.rtt))


def parallel(work: SimulatedRequest) -> Steps:
    """PEARL (2408.11850): ``depth`` tokens are drafted during every target pass, and both wait for each other."""
    depth = work.setting.depth
    pending = 0  # draft tokens whose first is accepted and whose others the next pass verifies
    while not work.done.triggered:
        yield work.env.process(work.draft(depth)) & work.env.process(work.verify(work.setting.rtt))
        if not pending:  # pre-verify: the pass had no draft tokens, and verifies the first of those drafted meanwhile
            if work.accepts(work.tokens, 0):
                work.accepted, pending = work.accepted + 1, 1
            work.commit(1)
            continue
        count = 0  # post-verify: the rest of the last draft, and the first token of the one drafted meanwhile
        while count < depth and work.accepts(work.tokens + count, pending + count):
            count += 1
        work.accepted += count
        pending = pending + count if count == depth else 0
        work.commit(count if pending else count + 1)


class Distributed:
    """DSI (2405.14105): drafting never waits. A pass is requested at every restart and after every ``depth`` tokens.

    A pass over m draft tokens yields the target's tokens at positions 1 to m + 1 since the restart. A rejection ends
    the run: passes in flight are cancelled, and drafting restarts after the recovered token. Passes in flight are
    limited by the servers and the network; when one is free, the longest draft is sent. While no pass is in flight any
    draft is sent, so that this is at least as fast as plain decoding on one server.
    """

    def __init__(self, work: SimulatedRequest) -> None:
        self.work, self.env, self.setting = work, work.env, work.setting
        self.max_passes = self.setting.verifiers * (1 + math.ceil(self.setting.rtt / self.setting.target))
        self.passes: dict[int, simpy.Process] = {}  # in flight, by their number of draft tokens
        self.run = self.drafted = self.verified = self.known = self.sent = 0
        self.restarted = self.env.event()

    def restart(self) -> None:
        """Starts a run after a token of the target's own. Later drafts and passes are discarded."""
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
        """Requests a pass over the draft if a whole block is new, or if no pass is in flight."""
        due = self.drafted - (self.drafted % self.setting.depth if self.passes else 0)
        if due > self.sent and len(self.passes) < self.max_passes and not self.work.done.triggered:
            self.sent = due
            self.passes[due] = self.env.process(self.verification(due, self.run))

    def verification(self, rows: int, run: int) -> Steps:
        """Runs a pass over ``rows`` draft tokens of run number ``run``."""
        try:
            yield from self.work.verify(self.setting.rtt)
            yield self.env.timeout(0)  # a token drafted at this very moment is part of the draft
        except self.work.interrupt:
            return
        if run != self.run:
            return
        del self.passes[rows]
        self.known = max(self.known, rows + 1)
        self.settle()
        if run == self.run:
            self.send()

    def settle(self) -> None:
        """Commits verified tokens. A position that is verified before it is drafted needs no draft."""
        while self.verified < self.known and not self.work.done.triggered:
            place = self.verified
            if place < self.drafted and self.work.accepts(self.work.tokens, place):
                self.verified += 1
                self.work.accepted += 1
                self.work.commit(1)
                continue
            self.work.commit(1)
            self.restart()

    def drafting(self) -> Steps:
        """Drafts one token after the other. A restart discards the one that is being drafted."""
        while True:
            began, run = self.env.now, self.run
            yield self.env.timeout(self.setting.draft) | self.restarted
            self.work.drafting += self.env.now - began
            if run != self.run:
                continue
            self.work.drafted += 1
            self.drafted += 1
            self.settle()
            self.send()


def distributed(work: SimulatedRequest) -> Steps:
    """DSI, see ``Distributed``."""
    run = Distributed(work)
    run.restart()
    work.env.process(run.drafting())
    yield work.done


STRATEGIES: dict[str, Callable[[SimulatedRequest], Steps]] = {
    "plain": plain,
    "si": sequential,
    "dsi": distributed,
    "pearl": parallel,
    "dsd": edge,
}
