"""Tensors of a safetensors file, each mapped into memory alone.

``safe_open`` checks a whole file and maps all of it, and what was read of it stays resident until it is closed. To map
each tensor alone, it would have to open the file for each, and parse all headers again.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Stored(NamedTuple):
    """A tensor in a file: the name of its dtype, its shape, and its bytes from ``start`` to ``end``."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A safetensors file, which is checked on construction.

    Attributes:
        path: the file.
        tensors: what is stored, by name.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises safetensors' own errors and OSError for a file that is damaged or not readable."""
        self.path = path
        names = safe_open(str(self.path), framework="pt").keys()
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        self.tensors: dict[str, Stored] = {}
        for name in names:
            fields = header[name]
            start, end = (8 + size + offset for offset in fields["data_offsets"])
            self.tensors[name] = Stored(fields["dtype"], tuple(fields["shape"]), start, end)

    def read(self, name: str) -> Tensor:
        """Returns a tensor. Its mapping is private, and ends with it."""
        stored = self.tensors[name]
        if stored.dtype not in _DTYPES or stored.start == stored.end:
            tensor: Tensor = safe_open(str(self.path), framework="pt").get_tensor(name)
            return tensor
        first = stored.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            content = mmap.mmap(file.fileno(), stored.end - first, access=mmap.ACCESS_COPY, offset=first)
        numbers = torch.frombuffer(
            content, dtype=torch.uint8, offset=stored.start - first, count=stored.end - stored.start
        )
        return numbers.view(_DTYPES[stored.dtype]).view(stored.shape)
