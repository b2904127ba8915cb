"""OCP's MXFP4: groups of 32 weights in e2m1, with a power of two as their scale. GGUF and gpt-oss store it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foretoken.models.formats.grouped import GroupLayout

_ZERO = 12
_E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # twice the value of each code, plus the zero point
MXFP4 = GroupLayout(4, 32, zero=_ZERO, levels=_E2M1)


def half_powers(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns half of 2 ** (exponent - 127), the scale of levels that are doubled; the two smallest are denormal."""
    wide = exponents.astype(np.uint32)
    pattern = np.where(wide < 2, np.uint32(0x00200000) << wide, (wide - 1) << np.uint32(23))
    return pattern.astype(np.uint32).view(np.float32)
