"""Packs the matrices of LoRA adapters for the kernels (csrc/lora.hpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.lora.modules import Product
from foretoken.models.formats.lora.tensors import AdapterLayer, LowRank
from foretoken.models.formats.quantize import Matrix as AnyMatrix
from foretoken.models.formats.quantize import floats
from foretoken.models.runners.native.bindings import (
    LANES,
    LORA_PARTS,
    UNIT,
    LoraAdapter,
    LoraLayer,
    LoraPart,
    LoraSpec,
    LoraWidths,
)
from foretoken.models.runners.native.build import packing_library
from foretoken.models.runners.native.held import halves
from foretoken.models.runners.native.memory import Arena, pack


class PackedAdapter:
    """The matrices of one adapter in float32.

    Args:
        architecture: the decoder's.
        layers: what the adapter adds to each layer.

    Attributes:
        address: of its ``LoraAdapter``.
    """

    def __init__(self, architecture: Architecture, layers: Sequence[AdapterLayer]) -> None:
        self._arena = Arena(packing_library())
        self._layers = (LoraLayer * len(layers))()
        self._rows = LoraWidths()
        for number, (layer, described) in enumerate(zip(layers, architecture.stack, strict=True)):
            specs = {kind: self._pack(kind, product, described.mlp == "gated") for kind, product in layer.items()}
            self._layers[number] = LoraLayer(**specs)
        self._adapter = LoraAdapter(self._layers, self._rows)
        self.address = ctypes.addressof(self._adapter)

    def _pack(self, kind: Product, product: LowRank, gated: bool) -> LoraSpec:
        interleave = kind == "up" and gated
        matrices = halves(product.up) if interleave else product.up
        up = self._parts(matrices, interleave)
        rank = max(part.from_ + part.matrix.steps for part in up)  # numbers that are read of down x
        down = F.pad(product.down, (0, 0, 0, max(0, rank - len(product.down))))
        spec = LoraSpec(LoraPart(pack(self._arena, [down]).matrix, 0, 0, 1), (LoraPart * LORA_PARTS)(*up))
        _widen(self._rows, spec)
        return spec

    def _parts(self, matrices: Sequence[AnyMatrix], interleave: bool) -> list[LoraPart]:
        """Packs each matrix [out, rank] by itself, without the zeros beside its own rank, if units do not overlap."""
        if len(matrices) > LORA_PARTS or any(matrix.shape[0] % UNIT for matrix in matrices):
            return [LoraPart(pack(self._arena, matrices, interleave=interleave).matrix, 0, 0, 1)]
        parts, block = [], 0
        for number, matrix in enumerate(matrices):
            columns = floats(matrix, torch.float32)
            used = columns.any(0).nonzero().flatten().tolist() or [0]
            own = pack(self._arena, [columns[:, used[0] : used[-1] + 1].contiguous()]).matrix
            parts.append(LoraPart(own, used[0], *((number, len(matrices)) if interleave else (block, 1))))
            block += matrix.shape[0] // LANES
        return parts


def _widen(widths: LoraWidths, spec: LoraSpec) -> None:
    """Makes room for the rows of a product."""
    widths.input = max(widths.input, spec.down.matrix.steps)
    widths.inner = max(widths.inner, spec.down.matrix.units * UNIT)
    blocks = UNIT // LANES
    for part in spec.up:
        last = part.to + (part.matrix.units * blocks - 1) * part.step  # block of sixteen numbers
        widths.added = max(widths.added, (last + 1) * LANES if part.matrix.units else 0)
