"""The weights of a decoder layer on the device, for the runner made of torch operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.experts import ExpertWeights
from foretoken.models.formats.latent import LatentWeights
from foretoken.models.formats.layer_inputs import LayerInputEnds, LayerInputWeights
from foretoken.models.formats.quantize import stacked
from foretoken.models.formats.recurrent import RecurrentWeights
from foretoken.models.formats.weights import (
    BesideWeights,
    CrossAttentionWeights,
    DenseMlpWeights,
    LayerWeights,
    NormWeight,
    SelfAttentionWeights,
)
from foretoken.models.runners.functional import activate, normalize
from foretoken.models.runners.linear import Product, moved, product
from foretoken.models.runners.torch_experts import TorchExperts
from foretoken.models.runners.torch_latent import TorchLatent
from foretoken.models.runners.triton_kernels import recurrent_kernels
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

    def __call__(self, x: Tensor, steps: Steps | None, any_kernel: bool) -> Tensor:
        """Returns the output [R, H] for an input [R, H]; ``any_kernel`` is that of ``Product``."""
        assert steps is not None, "recurrent layers need the order of rows"
        rows = self.into(x, any_kernel)
        gates = rows if self.gates is None else self.gates(x, any_kernel)
        mixed: Tensor = recurrent_kernels().mix(self.layer, rows, gates, steps)
        return self.out(mixed, any_kernel)


@dataclass(frozen=True, slots=True, eq=False)
class TorchLayerInput:
    """The weights for one layer's input."""

    gate: Product
    up: Product
    norm: NormWeight

    @staticmethod
    def of(device: torch.device, w: LayerInputWeights) -> TorchLayerInput:
        gate, up = product(w.gate.to(device)), product(w.up.to(device))
        return TorchLayerInput(gate, up, NormWeight(w.norm.to(device)))

    def __call__(self, a: Architecture, hidden: Tensor, inputs: Tensor, any_kernel: bool) -> Tensor:
        """Returns the addition to the residual stream [rows, H] for inputs [rows, width]."""
        gated = activate(a, self.gate(hidden, any_kernel), gated=False) * inputs
        return normalize(a, self.up(gated, any_kernel), self.norm)


class TorchLayerInputs:
    """The inputs of all layers.

    Args:
        a: the architecture, which has such inputs.
        w: the weights.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, a: Architecture, w: LayerInputEnds) -> None:
        assert a.layer_inputs is not None
        self._width, self._scale = a.layer_inputs.width, torch.tensor(a.layer_inputs.width**0.5, dtype=dtype)
        self._table = w.table.to(device)
        self._projection, self._norm = product(w.projection.to(device)), NormWeight(w.norm.to(device))

    def __call__(self, a: Architecture, tokens: Tensor, embedded: Tensor, any_kernel: bool) -> Tensor:
        """Returns the inputs [rows, layers, width] for tokens [rows] and their scaled embeddings [rows, H]."""
        projected = (self._projection(embedded, any_kernel) * a.hidden**-0.5).unflatten(-1, (-1, self._width))
        by_token = (F.embedding(tokens, self._table) * self._scale).view_as(projected)
        return (normalize(a, projected, self._norm) + by_token) * 0.5**0.5


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """The weights of a layer's attention on the device."""

    qkv: Product
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    v_norm: NormWeight | None
    out: Product
    sinks: Tensor | None
    relative: Tensor | None  # biases by distance on the CPU; see ``SelfAttentionWeights``

    @staticmethod
    def of(device: torch.device, w: SelfAttentionWeights) -> TorchAttention:
        return TorchAttention(
            qkv=product(stacked(w.qkv).to(device), moved(w.qkv_bias, device)),
            q_norm=moved_norm(w.q_norm, device),
            k_norm=moved_norm(w.k_norm, device),
            v_norm=moved_norm(w.v_norm, device),
            out=product(w.out.to(device), moved(w.out_bias, device)),
            sinks=moved(w.sinks, device),
            relative=w.relative,
        )


@dataclass(frozen=True, slots=True)
class TorchCross:
    """The weights of a layer's attention over an encoder's states on the device."""

    norm: NormWeight | None
    queries: Product
    keys_values: Product
    out: Product
    after: NormWeight | None

    @staticmethod
    def of(device: torch.device, w: CrossAttentionWeights) -> TorchCross:
        return TorchCross(
            norm=moved_norm(w.norm, device),
            queries=product(w.queries.to(device), moved(w.queries_bias, device)),
            keys_values=product(stacked(w.keys_values).to(device), moved(w.keys_values_bias, device)),
            out=product(w.out.to(device), moved(w.out_bias, device)),
            after=moved_norm(w.after, device),
        )


@dataclass(frozen=True, slots=True)
class TorchMlp:
    """The weights of a layer's MLP on the device."""

    up: Product
    down: Product

    @staticmethod
    def of(device: torch.device, w: DenseMlpWeights) -> TorchMlp:
        return TorchMlp(
            up=product(stacked(w.up).to(device), moved(w.up_bias, device)),
            down=product(w.down.to(device), moved(w.down_bias, device)),
        )

    def __call__(self, a: Architecture, x: Tensor, gated: bool, any_kernel: bool) -> Tensor:
        """Returns the output [rows, H] for an input [rows, H]; ``any_kernel`` is that of ``Product``."""
        return self.down(activate(a, self.up(x, any_kernel), gated), any_kernel)


@dataclass(frozen=True, slots=True)
class TorchBeside:
    """The weights of a dense MLP beside experts on the device, and the norms of both."""

    norm: NormWeight | None
    mlp: TorchMlp
    after: NormWeight | None
    after_experts: NormWeight | None

    @staticmethod
    def of(device: torch.device, w: BesideWeights) -> TorchBeside:
        norms = [moved_norm(norm, device) for norm in (w.norm, w.after, w.after_experts)]
        return TorchBeside(norms[0], TorchMlp.of(device, w.mlp), *norms[1:])


@dataclass(frozen=True, slots=True)
class TorchLayer:
    """The weights of one decoder layer on the device, with packed matrices."""

    norm: NormWeight | None
    attention: TorchAttention | TorchLatent | None
    recurrent: TorchRecurrent | None
    after_mixer: NormWeight | None
    cross: TorchCross | None
    mlp_norm: NormWeight | None
    mlp: TorchMlp | TorchExperts | None
    after_mlp: NormWeight | None
    beside: TorchBeside | None
    own_input: TorchLayerInput | None
    scalar: float

    @staticmethod
    def of(device: torch.device, a: Architecture, number: int, weights: LayerWeights) -> TorchLayer:
        recurrent = weights.recurrent
        return TorchLayer(
            norm=moved_norm(weights.norm, device),
            attention=_attention(device, a, weights.attention),
            recurrent=None if recurrent is None else TorchRecurrent.of(device, a, number, recurrent),
            after_mixer=moved_norm(weights.after_mixer, device),
            cross=None if weights.cross is None else TorchCross.of(device, weights.cross),
            mlp_norm=moved_norm(weights.mlp_norm, device),
            mlp=_mlp(device, weights.mlp),
            after_mlp=moved_norm(weights.after_mlp, device),
            beside=None if weights.beside is None else TorchBeside.of(device, weights.beside),
            own_input=None if weights.own_input is None else TorchLayerInput.of(device, weights.own_input),
            scalar=weights.scalar,
        )


def _attention(
    device: torch.device, a: Architecture, weights: SelfAttentionWeights | LatentWeights | None
) -> TorchAttention | TorchLatent | None:
    if isinstance(weights, LatentWeights):
        assert a.latent is not None
        return TorchLatent.of(device, weights, a.latent)
    return None if weights is None else TorchAttention.of(device, weights)


def _mlp(device: torch.device, weights: DenseMlpWeights | ExpertWeights | None) -> TorchMlp | TorchExperts | None:
    if isinstance(weights, ExpertWeights):
        return TorchExperts.of(device, weights)
    return None if weights is None else TorchMlp.of(device, weights)


def moved_norm(norm: NormWeight | None, device: torch.device) -> NormWeight | None:
    return None if norm is None else NormWeight(norm.weight.to(device), moved(norm.bias, device))
