"""Formulas for sequential and pipelined speculation, in seconds per token, for acceptance that is the same everywhere.

``alpha`` is the conditional acceptance rate of a draft token. ``target`` and ``draft`` are the seconds of a target pass
and of a draft pass. ``depth`` is the number of tokens drafted before a target pass is requested (the papers' gamma or
lookahead). ``rtt`` is the round trip in seconds between draft and target. A target pass takes the same time whatever
its rows, as in the papers. ``simulate`` simulates what is computed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretoken.core.checks import integer, number
from foretoken.core.errors import InvalidRequest
from foretoken.plan.formulas.theory import tokens_per_pass

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


def plain_seconds(target: float) -> float:
    """Plain decoding: one pass per token. Streamed tokens take the round trip once, not each."""
    _times(target=target)
    return target


def sequential_seconds(alpha: float, depth: int, target: float, draft: float, rtt: float = 0.0) -> float:
    """Sequential speculation: (g d + t + r) (1 - a) / (1 - a^(g+1)) (2211.17192, with a round trip per step)."""
    _times(target=target, draft=draft, rtt=rtt)
    return (depth * draft + target + rtt) / tokens_per_pass(alpha, depth)


def best_window(alpha: float, target: float, draft: float, rtt: float = 0.0, limit: int = MAX_WINDOW) -> int:
    """Returns the draft length from 1 to ``limit`` with the fewest seconds per token."""
    integer("limit", limit, 1)
    return min(range(1, limit + 1), key=lambda depth: sequential_seconds(alpha, depth, target, draft, rtt))


def servers_needed(target: float, draft: float, depth: int) -> int:
    """Returns SP = ceil(t / (g d)), the target servers with which no pass waits for another (2405.14105)."""
    _times(target=target, draft=draft)
    integer("depth", depth, 1)
    if draft == 0.0:
        raise InvalidRequest("draft must take time: a drafter that takes none needs infinitely many target servers")
    return max(1, math.ceil(target / (depth * draft) - 1e-9))


def distributed_seconds(alpha: float, depth: int, target: float, draft: float, rtt: float = 0.0) -> float:
    """DSI: (1 - a) (t + r + g d a / (1 - a^g)). Drafting continues during target passes (2405.14105, algorithm 1).

    A run of G accepted tokens and the recovered token, 1/(1-a) tokens on average, ends when the pass returns that was
    requested after ceil(G/g) blocks; E[ceil(G/g)] = a / (1 - a^g). It holds with ``servers_needed`` servers where
    g d <= t + r. For a longer lookahead it is an upper bound, because passes are then requested before a block is full.
    """
    _times(target=target, draft=draft, rtt=rtt)
    integer("depth", depth, 1)
    number("alpha", alpha, 0.0, 1.0)
    if alpha == 1.0:
        return draft
    return (1.0 - alpha) * (target + rtt + depth * draft * alpha / (1.0 - alpha**depth))


def parallel_tokens(alpha: float, depth: int) -> float:
    """Tokens per step of PEARL in its steady state: (1 - a^g) / ((1 - a) (1 + a - a^g)) (2408.11850).

    A step drafts g tokens during one pass. In the state pre-verify the pass verifies the first draft token alone: it
    emits one token, and with probability a the next step is post-verify. In that state it verifies g tokens, the rest
    of the draft and the first token of the next: it emits sum_{j<g} a^j tokens on average, and with probability a^g the
    state remains.
    """
    integer("depth", depth, 1)
    number("alpha", alpha, 0.0, 1.0)
    verified = tokens_per_pass(alpha, depth - 1)
    return verified / (1.0 + alpha - alpha**depth)


def parallel_seconds(alpha: float, depth: int, target: float, draft: float, rtt: float = 0.0) -> float:
    """PEARL: max(g d, t + r) over ``parallel_tokens``. Neither waits where g d = t + r (2408.11850: g = t/d)."""
    _times(target=target, draft=draft, rtt=rtt)
    return max(depth * draft, target + rtt) / parallel_tokens(alpha, depth)


def bounds(alpha: float, depth: int, target: float, draft: float) -> tuple[float, float]:
    """Returns bounds on the seconds per token of DSI with enough servers and no round trip (2405.14105).

    Lower: a draft pass (or a target pass, if shorter), and (1 - a) t, a target pass per recovered token. Upper: plain
    decoding and sequential speculation.
    """
    lower = max(min(draft, target), (1.0 - alpha) * target)
    return lower, min(plain_seconds(target), sequential_seconds(alpha, depth, target, draft))


def _times(**seconds: float) -> None:
    for name, value in seconds.items():
        number(name, value, 0.0)
    if seconds.get("target") == 0.0:
        raise InvalidRequest("target must take time, got 0 seconds for a pass")
