"""The schemes that ``foretoken quantize`` writes, by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.gguf.mixtures import MIXTURES
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.options import QUANTIZATIONS

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SCHEMES = (*QUANTIZATIONS, *FLOATS, *MIXTURES)


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a checkpoint is written as.

    Attributes:
        name: one of ``SCHEMES``.
        quantizer: bits and groups of a folder's matrices; None for floats and GGUF.
        dtype: of a folder of floats.
        gguf: whether a GGUF file is written.
    """

    name: str
    quantizer: Quantizer | None = None
    dtype: torch.dtype | None = None
    gguf: bool = False

    @staticmethod
    def of(name: str) -> Scheme:
        """Returns the scheme of a name, whatever its case. Raises InvalidRequest for another."""
        known = {scheme.lower(): scheme for scheme in SCHEMES}.get(name.lower())
        if known is None:
            raise InvalidRequest(f"scheme {name!r} is not known; known: {', '.join(SCHEMES)}")
        if known in QUANTIZATIONS:
            return Scheme(known, quantizer=Quantizer.of(known))
        return Scheme(known, dtype=FLOATS.get(known), gguf=known in MIXTURES)

    @property
    def quantizes(self) -> bool:
        """Whether numbers are rounded to few bits."""
        return self.dtype is None and self.name not in ("F32", "F16", "BF16")
