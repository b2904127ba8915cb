"""Memory for a model's weights: whether they fit, asked before anything is read, and none held that is not needed."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from foretoken.core.errors import ModelLoadError

_CGROUP = Path("/sys/fs/cgroup")
_GIB = 2**30


def weight_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, int8: bool) -> int:
    """Bytes of these tensors once loaded: in ``dtype``, or matrices other than the embedding in one byte each.

    A tied head counts, as it is packed apart from the embedding.
    """
    total = 0
    for name, shape in shapes.items():
        embeds = "embed_tokens" in name
        total += math.prod(shape) * (1 if int8 and len(shape) == 2 and not embeds else dtype.itemsize)
        if embeds and "lm_head.weight" not in shapes:
            total += math.prod(shape) * (1 if int8 else dtype.itemsize)
    return total


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken on that device, None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [free for free in (_machine(), _container()) if free is not None]
    return min(known) if known else None


def check_fits(needed: int, device: torch.device, what: str) -> None:
    """Raises ModelLoadError when ``needed`` bytes are more than are free."""
    free = free_memory(device)
    if free is not None and needed > free:
        raise ModelLoadError(
            f"{what} needs {needed / _GIB:.1f} GiB for its weights, but {free / _GIB:.1f} GiB are free on {device}; "
            "take a smaller dtype, quantization='int8', a smaller model, or another machine"
        )


def give_back() -> None:
    """Return what was freed to the system: glibc keeps it, in holes that the next large matrix may not fit."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _machine() -> int | None:
    kibibytes = _field(_lines(Path("/proc/meminfo")), "MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def _container() -> int | None:
    """What a container's limit leaves: pages of files that the kernel may drop do not count as taken."""
    limit, used = _lines(_CGROUP / "memory.max"), _lines(_CGROUP / "memory.current")
    if not limit or not used or not limit[0].isdigit():
        return None
    return int(limit[0]) - int(used[0]) + (_field(_lines(_CGROUP / "memory.stat"), "inactive_file") or 0)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _field(lines: Iterable[str], name: str) -> int | None:
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), None)
