"""The grades of exactness that a request may ask for. Imports nothing heavy."""

from __future__ import annotations

from enum import StrEnum


class Exactness(StrEnum):
    """What a request is promised."""

    DISTRIBUTION = "distribution"  # the target's law
    TRAJECTORY = "trajectory"  # the target's law, and one text per seed whatever the proposer, depth or batch
    TYPICAL = "lossy-typical"  # neither: Medusa's typical acceptance; outputs are labelled with it
