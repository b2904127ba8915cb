"""A decoder's weights as the runners take them: one layer at a time, with projections of the same input fused."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foretoken.models.formats.experts import ExpertWeights
from foretoken.models.formats.latent import LatentWeights
from foretoken.models.formats.layer_inputs import LayerInputEnds, LayerInputWeights
from foretoken.models.formats.quantize import Matrix
from foretoken.models.formats.recurrent import RecurrentWeights


@dataclass(frozen=True, slots=True)
class NormWeight:
    """Weight and bias of a norm, float32; the bias may be None. A norm is computed in float32 and rounded once."""

    weight: Tensor
    bias: Tensor | None = None

    def by_head(self, head_dim: int) -> NormWeight:
        """Returns the norm of heads as [head_dim], or as [heads, head_dim] if each head has its own."""
        if len(self.weight) == head_dim:
            return self
        bias = None if self.bias is None else self.bias.view(-1, head_dim)
        return NormWeight(self.weight.view(-1, head_dim), bias)


@dataclass(frozen=True, slots=True)
class SelfAttentionWeights:
    """The weights of a layer's attention. ``qkv`` holds the rows of queries, keys and values, then gates.

    In a layer that reads another layer's keys and values it holds queries alone. Norms of heads are [head_dim] for
    all heads, or [heads * head_dim].
    """

    qkv: tuple[Matrix, ...]
    qkv_bias: Tensor | None
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    out: Matrix
    out_bias: Tensor | None
    sinks: Tensor | None = None  # float32 [heads]
    v_norm: NormWeight | None = None
    relative: Tensor | None = None  # T5's biases by distance, float32 [heads, 2 * Architecture.farthest + 1]


@dataclass(frozen=True, slots=True)
class CrossAttentionWeights:
    """The weights of attention over an encoder's states, the input of ``keys_values``, and the norms around it."""

    norm: NormWeight | None
    queries: Matrix
    queries_bias: Tensor | None
    keys_values: tuple[Matrix, ...]
    keys_values_bias: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    after: NormWeight | None


@dataclass(frozen=True, slots=True)
class DenseMlpWeights:
    """The weights of a layer's MLP. ``up`` holds the rows of gate and up, or of up alone if it is not gated."""

    up: tuple[Matrix, ...]
    up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class BesideWeights:
    """A dense MLP beside experts (``experts.Beside``), its norms, and the norm of the experts' output."""

    norm: NormWeight
    mlp: DenseMlpWeights
    after: NormWeight
    after_experts: NormWeight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer, on the CPU: its mixers, its MLP, and the norms around them.

    Matrices are [out, in] row-major in the model's dtype, or quantized. A matrix may be a view of a mapped file, so
    runners copy or pack it; the mapping ends with it. Weights of norms include Gemma's offset of 1. A product of
    several matrices has the parts that the checkpoint stores, all of one kind.
    """

    norm: NormWeight | None
    attention: SelfAttentionWeights | LatentWeights | None
    after_mixer: NormWeight | None
    mlp_norm: NormWeight | None
    mlp: DenseMlpWeights | ExpertWeights | None
    after_mlp: NormWeight | None
    recurrent: RecurrentWeights | None = None
    cross: CrossAttentionWeights | None = None
    beside: BesideWeights | None = None
    own_input: LayerInputWeights | None = None
    scalar: float = 1.0  # factor of the residual stream after the layer


@dataclass(frozen=True, slots=True)
class Ends:
    """Embedding, last norm and vocabulary head. ``head`` is the embedding itself if the two are tied."""

    embedding: Matrix  # [V, H]; floats or grouped
    norm: NormWeight | None
    head: Matrix  # [V, H]
    head_bias: Tensor | None = None
    positions: Tensor | None = None  # learned, float32 [positions, H]
    embedding_norm: NormWeight | None = None
    layer_inputs: LayerInputEnds | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """The input side of a model whose residual stream starts from features instead of embeddings.

    Attributes:
        joined: whether the input of the first attention is [norm(embedding), norm(features)], so that its ``qkv`` is
            [out, 2H] (EAGLE-3, 2503.01840); otherwise embeddings are not used.
        norm: the norm on the features.
        norm_first: whether the residual stream starts from the normed features.
        fusion: [H, layers * Ht], makes features from the target's states after ``fused_layers`` layers, for runners
            that take these states in the place of features. None for none.
        fusion_bias: [H]; None for none.
        fused_layers: number of these layers.
        fuses_embedding: whether ``fusion`` [H, 2H] makes the residual stream from [norm(embedding), norm(features)]
            (MTP, 2412.19437; EAGLE-1, 2401.15077).
        fusion_norms: these norms; None for none.
    """

    joined: bool = False
    norm: NormWeight | None = None
    norm_first: bool = False
    fusion: Tensor | None = None
    fusion_bias: Tensor | None = None
    fused_layers: int = 0
    fuses_embedding: bool = False
    fusion_norms: tuple[NormWeight, NormWeight] | None = None
