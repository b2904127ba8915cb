"""The interval of a share that was counted."""

from __future__ import annotations

import math


def wilson(hits: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of ``hits`` of ``trials``, both at least 0; all of 0..1 for no trials. z: 95 %."""
    if trials <= 0:
        return 0.0, 1.0
    share, weight = hits / trials, z * z / trials
    middle = (share + weight / 2) / (1 + weight)
    reach = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials)) / (1 + weight)
    return max(0.0, middle - reach), min(1.0, middle + reach)
