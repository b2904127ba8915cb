"""Inputs of single layers (``families/layer_inputs.py``), made of torch operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.layer_inputs import LayerInputEnds, LayerInputWeights
from foretoken.models.formats.weights import NormWeight
from foretoken.models.runners.functional import activate, normalize
from foretoken.models.runners.linear import Product, product


@dataclass(frozen=True, slots=True, eq=False)
class TorchLayerInput:
    """What one layer does with its input."""

    gate: Product
    up: Product
    norm: NormWeight

    @staticmethod
    def of(device: torch.device, w: LayerInputWeights) -> TorchLayerInput:
        """Packs the weights for ``device``."""
        gate, up = product(w.gate.to(device)), product(w.up.to(device))
        return TorchLayerInput(gate, up, NormWeight(w.norm.to(device)))

    def __call__(self, a: Architecture, hidden: Tensor, inputs: Tensor, alone: bool) -> Tensor:
        """Returns what is added to the residual stream [rows, H] for inputs [rows, width]."""
        gated = activate(a, self.gate(hidden, alone), gated=False) * inputs
        return normalize(a, self.up(gated, alone), self.norm)


class TorchLayerInputs:
    """The inputs of all layers.

    Args:
        device: device of the weights.
        dtype: dtype of the computation.
        a: the architecture, which has such inputs.
        w: the weights.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, a: Architecture, w: LayerInputEnds) -> None:
        assert a.layer_inputs is not None
        self._width, self._scale = a.layer_inputs.width, torch.tensor(a.layer_inputs.width**0.5, dtype=dtype)
        self._table = w.table.to(device)
        self._projection, self._norm = product(w.projection.to(device)), NormWeight(w.norm.to(device))

    def __call__(self, a: Architecture, tokens: Tensor, embedded: Tensor, alone: bool) -> Tensor:
        """Returns the inputs [rows, layers, width] for tokens [rows] and their scaled embeddings [rows, H]."""
        projected = (self._projection(embedded, alone) * a.hidden**-0.5).unflatten(-1, (-1, self._width))
        own = (F.embedding(tokens, self._table) * self._scale).view_as(projected)
        return (normalize(a, projected, self._norm) + own) * 0.5**0.5
