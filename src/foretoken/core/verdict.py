"""What the target decided about one draft."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """``path``: accepted nodes from the root down, may be empty. ``token``: the one the target always adds."""

    path: tuple[int, ...]
    token: int
