"""Facts about the machine that macOS reports by name."""

from __future__ import annotations

import ctypes
import sys


def sysctl(name: str) -> int | None:
    """Returns a number that macOS knows by this name; None for an unknown name, and on other systems."""
    if sys.platform == "darwin":
        value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)  # little-endian, so that shorter numbers fit as well
        status = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
        return value.value if status == 0 and size.value in (4, 8) else None
    return None
