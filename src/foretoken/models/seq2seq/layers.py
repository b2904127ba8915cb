"""The layers of encoder and decoder on the device, with packed matrices, and the encoder itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.families.seq2seq import Seq2SeqArchitecture
from foretoken.models.formats.quantize import stacked
from foretoken.models.formats.weights import (
    CrossAttentionWeights,
    DenseMlpWeights,
    LayerWeights,
    NormWeight,
    SelfAttentionWeights,
)
from foretoken.models.runners.linear import Product, product
from foretoken.models.seq2seq.positions import RelativeBias
from foretoken.models.seq2seq.weights import StackEnds

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "swish": F.silu,
}
Normalize = Callable[[Tensor], Tensor]


def norm_of(norm: NormWeight, eps: float, device: torch.device) -> Normalize:
    """Returns the norm as a function; it is computed in float32 and rounded once."""
    weight, shape = norm.weight.to(device), norm.weight.shape
    if norm.bias is None:
        return lambda x: F.rms_norm(x.float(), shape, weight, eps).to(x.dtype)
    bias = norm.bias.to(device)
    return lambda x: F.layer_norm(x.float(), shape, weight, bias, eps).to(x.dtype)


def unchanged(x: Tensor) -> Tensor:
    """Returns x; replaces a norm that a model does not have."""
    return x


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention or cross-attention with the norm before it, or after the sum.

    Attributes:
        into: projection to queries, keys and values; in cross-attention, to queries alone.
        keys_values: projection of the encoder's output to keys and values; None in self-attention.
        out: output projection.
    """

    norm: Normalize
    into: Product
    keys_values: Product | None
    out: Product

    @staticmethod
    def of(w: SelfAttentionWeights, norm: Normalize, device: torch.device) -> Attention:
        into = product(stacked(w.qkv).to(device), _to(w.qkv_bias, device))
        return Attention(norm, into, None, product(w.out.to(device), _to(w.out_bias, device)))

    @staticmethod
    def across(w: CrossAttentionWeights, norm: Normalize, device: torch.device) -> Attention:
        queries = product(w.queries.to(device), _to(w.queries_bias, device))
        keys_values = product(stacked(w.keys_values).to(device), _to(w.keys_values_bias, device))
        return Attention(norm, queries, keys_values, product(w.out.to(device), _to(w.out_bias, device)))


@dataclass(frozen=True, slots=True)
class MLP:
    """down(activation(up x)), or down(activation(gate x) * up x)."""

    norm: Normalize
    up: Product
    down: Product
    activation: Callable[[Tensor], Tensor]
    gated: bool

    @staticmethod
    def of(w: DenseMlpWeights, norm: Normalize, a: Seq2SeqArchitecture, device: torch.device) -> MLP:
        up = product(stacked(w.up).to(device), _to(w.up_bias, device))
        down = product(w.down.to(device), _to(w.down_bias, device))
        return MLP(norm, up, down, _ACTIVATIONS[a.activation], a.gated)

    def __call__(self, x: Tensor, alone: bool) -> Tensor:
        wide = self.up(x, alone)
        if not self.gated:
            return self.down(self.activation(wide), alone)
        gate, up = wide.chunk(2, dim=-1)
        return self.down(self.activation(gate) * up, alone)


@dataclass(frozen=True, slots=True)
class Seq2SeqLayer:
    """One layer; only a decoder's has ``cross_attention``, the cross-attention."""

    self_attention: Attention
    cross_attention: Attention | None
    mlp: MLP

    @staticmethod
    def of(a: Seq2SeqArchitecture, device: torch.device, w: LayerWeights) -> Seq2SeqLayer:
        def norm(before: NormWeight | None, after: NormWeight | None) -> Normalize:
            chosen = before or after
            return unchanged if chosen is None else norm_of(chosen, a.eps, device)

        assert isinstance(w.attention, SelfAttentionWeights) and isinstance(w.mlp, DenseMlpWeights)
        cross = None if w.cross is None else Attention.across(w.cross, norm(w.cross.norm, w.cross.after), device)
        return Seq2SeqLayer(
            Attention.of(w.attention, norm(w.norm, w.after_mixer), device),
            cross,
            MLP.of(w.mlp, norm(w.mlp_norm, w.after_mlp), a, device),
        )


def branch(first: bool, norm: Normalize, hidden: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns hidden + part(norm(hidden)) if norms come first, else norm(hidden + part(hidden))."""
    return hidden + part(norm(hidden)) if first else norm(hidden + part(hidden))


def build(
    a: Seq2SeqArchitecture, device: torch.device, weights: Iterable[LayerWeights]
) -> tuple[list[Seq2SeqLayer], list[RelativeBias]]:
    """Returns a stack's layers and its tables of relative positions: none, one for all layers, or one per layer."""
    made: list[Seq2SeqLayer] = []
    tables: list[RelativeBias] = []
    for layer in weights:
        made.append(Seq2SeqLayer.of(a, device, layer))
        assert isinstance(layer.attention, SelfAttentionWeights)
        if layer.attention.relative is not None and (a.layer_bias or not tables):
            tables.append(RelativeBias(layer.attention.relative))
        del layer  # before the next is read
    return made, tables


class InputStage:
    """The input of one stack: from token ids to the residual stream."""

    def __init__(self, a: Seq2SeqArchitecture, embedding: Tensor, ends: StackEnds, device: torch.device) -> None:
        self._embedding, self._scale = embedding, a.embedding_scale
        self._positions = _to(ends.positions, device)
        self._norm = unchanged if ends.norm is None else norm_of(ends.norm, a.eps, device)

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = F.embedding(tokens, self._embedding)
        if self._scale != 1.0:
            hidden = hidden * self._scale
        return self._norm(hidden if self._positions is None else hidden + self._positions[positions])


class EncoderStack:
    """An encoder of torch operators."""

    def __init__(
        self,
        a: Seq2SeqArchitecture,
        layers: Iterable[LayerWeights],
        ends: StackEnds,
        input_stage: InputStage,
        device: torch.device,
    ) -> None:
        self._a, self._stack, self._input_stage, self._device = a, a.encoder, input_stage, device
        self._blocks, self._tables = build(a, device, layers)
        self._last = unchanged if ends.last is None else norm_of(ends.last, a.eps, device)

    @torch.inference_mode()
    def __call__(self, source: tuple[int, ...]) -> Tensor:
        """Returns the output for a source, [source, H]."""
        positions = torch.arange(len(source))
        biases = [table(positions, positions).to(self._device) for table in self._tables]
        hidden = self._input_stage(torch.tensor(source, device=self._device), positions.to(self._device))
        if len(source) == 1:
            hidden = hidden.repeat(2, 1)  # a single row may use another kernel (see ``linear.py``)
        for number, block in enumerate(self._blocks):
            bias = biases[min(number, len(biases) - 1)] if biases else None
            look = partial(self._attend, block.self_attention, bias, len(source))
            hidden = branch(self._a.norm_first, block.self_attention.norm, hidden, look)
            hidden = branch(self._a.norm_first, block.mlp.norm, hidden, partial(block.mlp, alone=True))
        return self._last(hidden)[: len(source)]

    def _attend(self, attention: Attention, bias: Tensor | None, keys: int, x: Tensor) -> Tensor:
        s = self._stack
        heads = attention.into(x, True).view(len(x), 3, s.heads, s.head_dim).permute(1, 2, 0, 3)
        scores = torch.matmul(heads[0], heads[1, :, :keys].transpose(1, 2)).float() * s.scale
        if bias is not None:
            scores = scores + bias
        mixed = torch.matmul(scores.softmax(-1).to(x.dtype), heads[2, :, :keys])
        return attention.out(mixed.transpose(0, 1).reshape(len(x), s.width), True)


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
