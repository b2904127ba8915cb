"""Result of verifying one draft."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted draft tokens and the target's own token.

    Args:
        path: Accepted nodes from the root down. May be empty.
        token: The recovered or bonus token that the target adds after the path.
    """

    path: tuple[int, ...]
    token: int
