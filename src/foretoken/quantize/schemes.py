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
    """Target format of a quantized checkpoint.

    Attributes:
        name: one of ``SCHEMES``.
        quantizer: bits and groups of a folder's matrices; None for floats and GGUF.
        dtype: dtype of a folder of floats.
        gguf: whether a GGUF file is written.
    """

    name: str
    quantizer: Quantizer | None = None
    dtype: torch.dtype | None = None
    gguf: bool = False

    @staticmethod
    def of(name: str) -> Scheme:
        """Returns the scheme of a name in any case. Raises InvalidRequest for an unknown name."""
        scheme_name = {scheme.lower(): scheme for scheme in SCHEMES}.get(name.lower())
        if scheme_name is None:
            raise InvalidRequest(f"scheme {name!r} is not known; known: {', '.join(SCHEMES)}")
        if scheme_name in QUANTIZATIONS:
            return Scheme(scheme_name, quantizer=Quantizer.of(scheme_name))
        return Scheme(scheme_name, dtype=FLOATS.get(scheme_name), gguf=scheme_name in MIXTURES)

    @property
    def quantizes(self) -> bool:
        """Whether weights are rounded to few bits."""
        return self.dtype is None and self.name not in ("F32", "F16", "BF16")
