"""Packs the matrices of LoRA adapters for the kernels (csrc/lora.hpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.lora.modules import Product
from foretoken.models.formats.lora.tensors import AdapterLayer, LowRank
from foretoken.models.runners.native.bindings import LoraLayer, LoraSpec
from foretoken.models.runners.native.build import packing_library
from foretoken.models.runners.native.describe import halves
from foretoken.models.runners.native.memory import Arena, pack


class PackedAdapter:
    """The matrices of one adapter in float32.

    Args:
        architecture: the decoder's.
        layers: what the adapter adds to each layer.

    Attributes:
        address: of the ``LoraLayer`` of each layer.
    """

    def __init__(self, architecture: Architecture, layers: Sequence[AdapterLayer]) -> None:
        self._arena = Arena(packing_library())
        self._layers = (LoraLayer * len(layers))()
        for number, (layer, described) in enumerate(zip(layers, architecture.stack, strict=True)):
            specs = {kind: self._pack(kind, product, described.mlp == "gated") for kind, product in layer.items()}
            self._layers[number] = LoraLayer(**specs)
        self.address = ctypes.addressof(self._layers)

    def _pack(self, kind: Product, product: LowRank, gated: bool) -> LoraSpec:
        interleave = kind == "up" and gated
        up = halves(product.up) if interleave else product.up
        return LoraSpec(
            down=pack(self._arena, [product.down]).matrix, up=pack(self._arena, up, interleave=interleave).matrix
        )
