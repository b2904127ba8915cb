"""Memory for a model's weights: checks that they fit before anything is read, and returns freed memory."""

import ctypes
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from foretoken.core.devices import address_space, group_limits, machine_memory
from foretoken.core.errors import ModelLoadError

CGROUP = Path("/sys/fs/cgroup")
_GIB = 2**30
_EMBEDDINGS = ("embed_tokens", "word_embeddings.", "embed_in", ".wte.")  # parts of the names of embeddings
_OF_LAYERS = "embed_tokens_per_layer"  # not a vocabulary head
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # options of mallopt
_WIDE = 512  # elements of a row; freed memory of narrower layers is not returned


def weight_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, bits: float | None) -> int:
    """Returns the bytes of these tensors once they are loaded.

    A tied head counts twice, because it is packed separately from the embedding.

    Args:
        shapes: shapes of the checkpoint's tensors by name.
        dtype: dtype of the loaded tensors.
        bits: bits of each weight of matrices other than the embedding; None for those of the dtype.
    """
    total, quantized = 0.0, dtype.itemsize if bits is None else bits / 8
    for name, shape in shapes.items():
        embeds = any(table in name for table in _EMBEDDINGS)
        total += math.prod(shape) * (quantized if len(shape) > 1 and not embeds else dtype.itemsize)
        if embeds and _OF_LAYERS not in name and "lm_head.weight" not in shapes:
            total += math.prod(shape) * quantized
    return int(total)


def free_memory(device: torch.device) -> int | None:
    """Returns the free bytes on the device; None if the system does not report them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = (machine_memory(), address_space(), *group_limits(groups=CGROUP))
    return min((limit.free for limit in limits if limit is not None), default=None)


def check_fits(needed: int, device: torch.device, what: str) -> None:
    """Raises ModelLoadError if ``what`` needs more bytes than are free on the device."""
    free = free_memory(device)
    if free is not None and needed > free:
        raise ModelLoadError(
            f"{what} needs {needed / _GIB:.1f} GiB for its weights, but {free / _GIB:.1f} GiB are free on {device}; "
            "take a smaller dtype, quantization='int8', a smaller model, or another machine"
        )


def reuse_freed() -> None:
    """Makes glibc reuse freed memory for temporary arrays up to 16 MiB; ``give_back`` returns it later.

    Otherwise each array is mapped and zeroed anew, which takes several times as long as the computation in it.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if change is not None:
        change(_TRIM_THRESHOLD, 2**26)
        change(_MMAP_THRESHOLD, 2**24)
        change(_ARENA_MAX, 1)  # freed memory of other threads' arenas cannot be returned


def give_back(width: int = _WIDE) -> None:
    """Returns freed memory to the system. glibc keeps it otherwise, in holes too small for the next large matrix.

    width: width of the layers, or tokens of the vocabulary, that were read last; small ones are skipped.
    """
    if width < _WIDE:
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
