"""Grades of exactness that a request may ask for, and the verdict on one draft. This module must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Exactness(StrEnum):
    """The property that a request's output is promised to have."""

    DISTRIBUTION = "distribution"  # the target's distribution
    TRAJECTORY = "trajectory"  # the same, and one output per seed for all proposers, draft lengths and batches
    TYPICAL = "lossy-typical"  # neither: Medusa's typical acceptance. Outputs carry this label


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted draft tokens and the target's own token.

    Args:
        path: Accepted nodes from the root down. May be empty.
        token: The recovered or bonus token that the target adds after the path.
    """

    path: tuple[int, ...]
    token: int
