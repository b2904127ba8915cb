"""Packs the matrices of LoRA adapters for the kernels (csrc/lora.hpp)."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.layers import Layer
from foretoken.models.formats.lora.modules import Product
from foretoken.models.formats.lora.tensors import AdapterLayer, LowRank
from foretoken.models.formats.quantize import Matrix as AnyMatrix
from foretoken.models.formats.quantize import floats
from foretoken.models.runners.native.bindings import (
    LANES,
    LORA_PARTS,
    TILE_STEPS,
    UNIT,
    LoraAdapter,
    LoraLayer,
    LoraPart,
    LoraSpec,
    LoraWidths,
    Matrix,
)
from foretoken.models.runners.native.build import packing_library
from foretoken.models.runners.native.packing import Arena, halves, pack


class PackedAdapter:
    """The matrices of one adapter in float32. layers: the adapter's matrices by layer."""

    def __init__(self, architecture: Architecture, layers: Sequence[AdapterLayer]) -> None:
        self._memory = Arena(packing_library(), 2**22)
        self._layers = (LoraLayer * len(layers))()
        self._stacks: list[object] = []  # memory that the layers point to
        self._adapter = LoraAdapter(layers=self._layers, layer_count=len(layers))
        for number, (layer, described) in enumerate(zip(layers, architecture.stack, strict=True)):
            self._layers[number] = self._layer(layer, described)
        self.address = ctypes.addressof(self._adapter)

    def _layer(self, layer: AdapterLayer, described: Layer) -> LoraLayer:
        specs: dict[str, object] = {}
        for kind, product in layer.items():
            interleave = _interleaved(kind, described)
            if isinstance(product, LowRank):
                specs[kind] = self._pack(product, interleave, self._adapter.rows)
                continue
            of_heads = kind in ("absorb", "expand")
            widths, shared = self._adapter.heads if of_heads else self._adapter.pairs, dict[int, Matrix]()
            stack = (LoraSpec * len(product))()
            for number, part in enumerate(product):
                if part is not None:
                    stack[number] = self._pack(part, interleave, widths, shared if of_heads else None)
            self._stacks.append(stack)
            specs[kind] = stack
        return LoraLayer(**specs)

    def _pack(
        self, product: LowRank, interleave: bool, widths: LoraWidths, shared: dict[int, Matrix] | None = None
    ) -> LoraSpec:
        """Packs both halves of a product. shared: packed matrices by the identity of shared tensors."""
        shared = {} if shared is None else shared
        matrices = halves(product.up) if interleave else product.up
        up = self._parts(matrices, interleave, shared)
        down = shared.get(id(product.down))
        if down is None:
            down = shared[id(product.down)] = pack(self._memory, [product.down]).matrix
        spec = LoraSpec(LoraPart(down, 0, 0, 1), (LoraPart * LORA_PARTS)(*up))
        _widen(widths, spec)
        return spec

    def _parts(self, matrices: Sequence[AnyMatrix], interleave: bool, shared: dict[int, Matrix]) -> list[LoraPart]:
        """Packs each matrix [out, rank] separately, without the zeros outside its rank, if units do not overlap."""
        if len(matrices) > LORA_PARTS or any(matrix.shape[0] % UNIT for matrix in matrices):
            return [LoraPart(pack(self._memory, matrices, interleave=interleave).matrix, 0, 0, 1)]
        parts, block = [], 0
        for number, matrix in enumerate(matrices):
            first, own = self._own(matrix, shared)
            parts.append(LoraPart(own, first, *((number, len(matrices)) if interleave else (block, 1))))
            block += matrix.shape[0] // LANES
        return parts

    def _own(self, matrix: AnyMatrix, shared: dict[int, Matrix]) -> tuple[int, Matrix]:
        """Packs a matrix from the tile with its first column that is not zero to its last one.

        Returns:
            Index of the first column, and the matrix. With whole tiles only computed columns of down x are read.
        """
        columns = floats(matrix, torch.float32)
        used = np.flatnonzero(columns.numpy().any(axis=0)).tolist() or [0]
        first = used[0] // TILE_STEPS * TILE_STEPS
        packed = shared.get(id(matrix))
        if packed is None:
            packed = shared[id(matrix)] = pack(self._memory, [columns[:, first : used[-1] + 1].contiguous()]).matrix
        return first, packed


def _interleaved(kind: Product, layer: Layer) -> bool:
    if kind == "up":
        return layer.mlp != "ungated"
    return kind in ("shared_up", "expert_up") and layer.experts is not None and layer.experts.gated


def _widen(widths: LoraWidths, spec: LoraSpec) -> None:
    widths.input = max(widths.input, spec.down.matrix.steps)
    widths.inner = max(widths.inner, spec.down.matrix.units * UNIT)
    blocks = UNIT // LANES
    for part in spec.up:
        last = part.to + (part.matrix.units * blocks - 1) * part.step  # block of sixteen floats
        widths.added = max(widths.added, (last + 1) * LANES if part.matrix.units else 0)
