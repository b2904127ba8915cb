"""A recurrent token mixer on torch tensors: its products, around Triton's kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.quantize import stacked
from foretoken.models.formats.recurrent import RecurrentWeights
from foretoken.models.runners.linear import Product, moved, product
from foretoken.models.runners.triton_kernels.available import recurrent_kernels
from foretoken.models.runners.triton_kernels.steps import RecurrentLayer, Steps


@dataclass(frozen=True, slots=True)
class TorchRecurrent:
    """The weights of a recurrent mixer on the device."""

    into: Product
    gates: Product | None
    layer: RecurrentLayer
    out: Product

    @staticmethod
    def of(device: torch.device, a: Architecture, number: int, w: RecurrentWeights) -> TorchRecurrent:
        """Packs the weights of layer ``number`` for ``device``."""
        kind, sizes = a.stack[number].recurrent, a.recurrence
        assert kind is not None and sizes is not None
        return TorchRecurrent(
            into=product(stacked(w.into).to(device), moved(w.into_bias, device)),
            gates=None if w.gates is None else product(w.gates.to(device)),
            layer=RecurrentLayer(
                kind=kind,
                sizes=sizes,
                number=a.first(number).recurrent_layers,
                eps=a.eps,
                conv=w.conv.to(device),
                conv_bias=moved(w.conv_bias, device),
                decay=moved(w.decay, device),
                step_bias=moved(w.step_bias, device),
                norm=moved(w.norm, device),
                skip=moved(w.skip, device),
            ),
            out=product(w.out.to(device), moved(w.out_bias, device)),
        )

    def __call__(self, x: Tensor, steps: Steps | None, alone: bool) -> Tensor:
        """Returns the output [R, H] for an input [R, H]; ``alone`` is that of ``Product``."""
        assert steps is not None, "recurrent layers need the order of rows"
        rows = self.into(x, alone)
        gates = rows if self.gates is None else self.gates(x, alone)
        mixed: Tensor = recurrent_kernels().mix(self.layer, rows, gates, steps)
        return self.out(mixed, alone)
