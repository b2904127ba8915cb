"""Setting of a simulation, the draft length that suits a round trip, and the target servers that are needed.

``alpha`` is the conditional acceptance rate of a draft token, the same everywhere. ``target`` and ``draft`` are the
seconds of a target pass and of a draft pass. ``depth`` is the number of tokens drafted before a target pass is
requested (the papers' gamma or lookahead). ``rtt`` is the round trip in seconds between draft and target. A target pass
takes the same time whatever its rows, as in the papers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretoken.core.checks import integer, number
from foretoken.core.errors import InvalidRequest

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

    Raises:
        InvalidRequest: A pass takes no time.
    """
    if not target > 0.0 or not draft > 0.0:
        raise InvalidRequest(f"passes must take time, got {target} s of the target and {draft} s of the draft")
    return max(1, math.ceil(target / (depth * draft) - 1e-9))
