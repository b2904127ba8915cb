"""Grades of exactness that a request may ask for. This module must not import torch."""

from __future__ import annotations

from enum import StrEnum


class Exactness(StrEnum):
    """The property that a request's output is promised to have."""

    DISTRIBUTION = "distribution"  # the target's distribution
    TRAJECTORY = "trajectory"  # the same, and one output per seed for all proposers, draft lengths and batches
    TYPICAL = "lossy-typical"  # neither: Medusa's typical acceptance. Outputs carry this label
