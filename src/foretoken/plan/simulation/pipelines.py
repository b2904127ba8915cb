"""What sequential and pipelined speculation yield on paper, in seconds a token, for acceptance the same everywhere.

``alpha`` is the chance that a drafted token is accepted if those before it were; ``target`` and ``draft`` are the
seconds of a target pass and of a draft step; ``depth`` is what is drafted before a pass is asked for, the papers'
gamma or lookahead; ``rtt`` is the round trip in seconds between the drafter and the target. A target pass takes the
same time whatever its rows, as in the papers. ``simulate`` counts what is written here.
"""

from __future__ import annotations

import math

from foretoken.core.checks import integer, number
from foretoken.core.errors import InvalidRequest
from foretoken.plan.formulas.theory import tokens_per_pass

LIMIT = 32  # drafted tokens a round that ``best_window`` looks at


def plain_seconds(target: float) -> float:
    """One pass a token; what streams through a network pays its round trip once, not for each token."""
    _times(target=target)
    return target


def sequential_seconds(alpha: float, depth: int, target: float, draft: float, rtt: float = 0.0) -> float:
    """(g d + t + r) (1 - a) / (1 - a^(g+1)): draft, then wait for the pass (2211.17192, and a round trip).

    Every round crosses the network once there and back, so that a longer draft shares the crossing.
    """
    _times(target=target, draft=draft, rtt=rtt)
    return (depth * draft + target + rtt) / tokens_per_pass(alpha, depth)


def best_window(alpha: float, target: float, draft: float, rtt: float = 0.0, limit: int = LIMIT) -> int:
    """The depth from 1 to ``limit`` with the fewest seconds a token: what an edge should draft before it sends."""
    integer("limit", limit, 1)
    return min(range(1, limit + 1), key=lambda depth: sequential_seconds(alpha, depth, target, draft, rtt))


def servers_needed(target: float, draft: float, depth: int) -> int:
    """SP = ceil(t / (g d)): target servers with which no verification waits for another (2405.14105)."""
    _times(target=target, draft=draft)
    integer("depth", depth, 1)
    if draft == 0.0:
        raise InvalidRequest("draft must take time: a drafter that takes none needs infinitely many target servers")
    return max(1, math.ceil(target / (depth * draft) - 1e-9))


def distributed_seconds(alpha: float, depth: int, target: float, draft: float, rtt: float = 0.0) -> float:
    """(1 - a) (t + r + g d a / (1 - a^g)): drafting goes on while passes are under way (2405.14105, algorithm 1).

    A run of G accepted tokens and the correction, 1/(1-a) tokens in the mean, ends when the pass that was asked for
    after ceil(G/g) blocks returns; E[ceil(G/g)] = a / (1 - a^g). Holds with ``servers_needed`` servers where
    g d <= t + r; a longer lookahead is only bounded by it, as passes are then asked for before a block is full.
    """
    _times(target=target, draft=draft, rtt=rtt)
    integer("depth", depth, 1)
    number("alpha", alpha, 0.0, 1.0)
    if alpha == 1.0:
        return draft
    return (1.0 - alpha) * (target + rtt + depth * draft * alpha / (1.0 - alpha**depth))


def parallel_tokens(alpha: float, depth: int) -> float:
    """(1 - a^g) / ((1 - a) (1 + a - a^g)) tokens a round of PEARL in its steady state (2408.11850).

    A round drafts g tokens beside one pass. Before a draft is trusted (pre-verify) the pass judges its first token
    alone: one token comes of it, and with chance a the next round is of the other kind. Then (post-verify) it judges g:
    the rest of the draft and the first token of the next, sum_{j<g} a^j in the mean, and with chance a^g goes on.
    """
    integer("depth", depth, 1)
    number("alpha", alpha, 0.0, 1.0)
    judged = tokens_per_pass(alpha, depth - 1)
    return judged / (1.0 + alpha - alpha**depth)


def parallel_seconds(alpha: float, depth: int, target: float, draft: float, rtt: float = 0.0) -> float:
    """max(g d, t + r) over ``parallel_tokens``: neither waits long where g d = t + r (2408.11850: g = t/d)."""
    _times(target=target, draft=draft, rtt=rtt)
    return max(depth * draft, target + rtt) / parallel_tokens(alpha, depth)


def bounds(alpha: float, depth: int, target: float, draft: float) -> tuple[float, float]:
    """The least and the most seconds a token of distributed speculation with servers enough and no round trip.

    No less than a draft step, where anything is accepted at all, nor than (1 - a) t, a pass for every correction; no
    more than plain decoding and than sequential speculation (2405.14105).
    """
    least = max(min(draft, target), (1.0 - alpha) * target)
    return least, min(plain_seconds(target), sequential_seconds(alpha, depth, target, draft))


def _times(**seconds: float) -> None:
    for name, value in seconds.items():
        number(name, value, 0.0)
    if seconds.get("target") == 0.0:
        raise InvalidRequest("target must take time, got 0 seconds for a pass")
