"""A decoder's weights as the runners take them: one layer at a time, with projections of the same input fused.

A layer's dataclasses hold products: of a checkpoint ``LinearWeights`` and ``MatrixStack``, of the torch runner its own
products on the device (``runners/torch_layers.py``). All else is the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from foretoken.models.families.experts import Experts
from foretoken.models.formats.quantize import Matrix

LinearT = TypeVar("LinearT")
StackT = TypeVar("StackT")


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """One product: the matrices that the checkpoint stores, and a bias."""

    parts: tuple[Matrix, ...]  # matrices with the same inputs, all of one kind, concatenated along outputs
    bias: Tensor | None = None  # biases of all outputs, in the model's dtype; None for none


@dataclass(frozen=True, slots=True, eq=False)
class MatrixStack:
    """Matrices of all experts, or heads, that are one product each: for instance gate and up, or down."""

    count: int  # number of experts
    read: Callable[[int], tuple[Matrix, ...]]  # reads the parts of one expert, each [out, in]
    biases: tuple[Tensor, ...] = ()  # biases of each part, [experts, out] in the model's dtype; empty for none
    quantized: bool = False  # whether parts are quantized when they are read, so that all have one layout


@dataclass(frozen=True, slots=True)
class NormWeight:
    """Weight and bias of a norm, float32; the bias may be None. A norm is computed in float32 and rounded once."""

    weight: Tensor
    bias: Tensor | None = None

    def by_head(self, head_dim: int) -> "NormWeight":
        """Returns the norm of heads as [head_dim], or as [heads, head_dim] if each head has its own."""
        if len(self.weight) == head_dim:
            return self
        bias = None if self.bias is None else self.bias.view(-1, head_dim)
        return NormWeight(self.weight.view(-1, head_dim), bias)


@dataclass(frozen=True, slots=True)
class SelfAttentionWeights(Generic[LinearT]):
    """The weights of a layer's attention. ``qkv`` makes queries, keys and values, then gates.

    In a layer that reads another layer's keys and values it makes queries alone. Norms of heads are [head_dim] for
    all heads, or [heads * head_dim].
    """

    qkv: LinearT
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    out: LinearT
    sinks: Tensor | None = None  # float32 [heads]
    v_norm: NormWeight | None = None
    relative: Tensor | None = None  # T5's biases by distance, float32 [heads, 2 * farthest + 1]


@dataclass(frozen=True, slots=True)
class CrossAttentionWeights(Generic[LinearT]):
    """The weights of attention over an encoder's states, the input of ``keys_values``, and the norms around it."""

    norm: NormWeight | None
    queries: LinearT
    keys_values: LinearT
    out: LinearT
    after: NormWeight | None


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights(Generic[LinearT, StackT]):
    """The weights of a layer of latent attention."""

    into: LinearT  # makes the queries or their latent, then the latent of keys and values, then the rotary key
    query_norm: NormWeight | None  # norm of the queries' latent; None if they have none
    query_up: LinearT | None  # from their latent to queries; or None
    latent_norm: NormWeight
    absorb: StackT  # for each head, from a query's plain part to a vector that is multiplied by latents, [rank, plain]
    expand: StackT  # for each head, from a mix of latents to a value, [value, rank]
    out: LinearT  # the last matrix


@dataclass(frozen=True, slots=True)
class RecurrentWeights(Generic[LinearT]):
    """The weights of a recurrent layer."""

    into: LinearT  # makes the channels of the convolution, then the output's gate
    # makes the gates of all heads, [2 * heads, in] of floats: beta, then the step; None without a state
    gates: LinearT | None
    conv: Tensor  # float32 [window + 1, channels]; the row itself first, then the rows before it
    conv_bias: Tensor | None  # float32 [channels]
    decay: Tensor | None  # float32 [heads]; a step s multiplies the state by exp(decay * softplus(s + step_bias))
    step_bias: Tensor | None  # float32 [heads]
    # weight of the norm of each head's output, float32 [value_dim]; in Mamba-2 of each group's, [out]
    norm: Tensor | None
    out: LinearT  # the last matrix
    skip: Tensor | None = None  # float32 [heads]; a head's value times this is added to its output


@dataclass(frozen=True, slots=True)
class DenseMlpWeights(Generic[LinearT]):
    """The weights of a layer's MLP. ``up`` makes gate and up, or up alone if it is not gated."""

    up: LinearT
    down: LinearT


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights(Generic[LinearT, StackT]):
    """The weights of one layer of experts."""

    experts: Experts  # their sizes and activation
    router: LinearT  # [experts, H], float32 or bfloat16, with a float32 bias
    correction: Tensor | None  # float32 [experts], added to the scores that choose experts; or None
    up: StackT  # gate and up of each expert, or up without gate
    down: StackT
    shared_up: LinearT | None = None  # gate and up of the shared expert; None for none
    shared_down: LinearT | None = None
    shared_gate: Tensor | None = None  # float32 [H], or None
    router_norm: NormWeight | None = None  # norm of the router's input, [H]; None if its input is that of the experts
    expert_scales: Tensor | None = None  # factors of the experts' weights, float32 [experts]; or None


@dataclass(frozen=True, slots=True)
class BesideWeights(Generic[LinearT]):
    """A dense MLP beside experts (``experts.Beside``), its norms, and the norm of the experts' output."""

    norm: NormWeight
    mlp: DenseMlpWeights[LinearT]
    after: NormWeight
    after_experts: NormWeight


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputWeights(Generic[LinearT]):
    """Weights for one layer's input: a gate [width, H], the last matrix [H, width] and a norm, [H]."""

    gate: LinearT
    up: LinearT
    norm: NormWeight


@dataclass(frozen=True, slots=True)
class DecoderLayer(Generic[LinearT, StackT]):
    """The weights of one decoder layer: its mixers, its MLP, and the norms around them.

    Matrices are [out, in] row-major in the model's dtype, or quantized. Those of a checkpoint are on the CPU. They may
    be views of a mapped file, so runners copy or pack them; the mapping ends with them. Weights of norms include
    Gemma's offset of 1.
    """

    norm: NormWeight | None
    attention: SelfAttentionWeights[LinearT] | LatentWeights[LinearT, StackT] | None
    after_mixer: NormWeight | None
    mlp_norm: NormWeight | None
    mlp: DenseMlpWeights[LinearT] | ExpertWeights[LinearT, StackT] | None
    after_mlp: NormWeight | None
    recurrent: RecurrentWeights[LinearT] | None = None
    cross: CrossAttentionWeights[LinearT] | None = None
    beside: BesideWeights[LinearT] | None = None
    own_input: LayerInputWeights[LinearT] | None = None
    scalar: float = 1.0  # factor of the residual stream after the layer


LayerWeights = DecoderLayer[LinearWeights, MatrixStack]
"""The weights of a layer as a checkpoint has them."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputEnds:
    """Weights that produce the inputs of all layers."""

    table: Tensor  # embeddings [V, layers * width], in the model's dtype
    projection: LinearWeights  # projection of the model's embedding, [layers * width, H]
    norm: NormWeight  # norm of the projection for one layer, [width]


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
    """The input side of a model whose residual stream starts from features instead of embeddings."""

    # whether the input of the first attention is [norm(embedding), norm(features)], so that its ``qkv`` is [out, 2H]
    # (EAGLE-3, 2503.01840); otherwise embeddings are not used
    joined: bool = False
    norm: NormWeight | None = None  # the norm on the features
    norm_first: bool = False  # whether the residual stream starts from the normed features
    # [H, layers * Ht], makes features from the target's states after ``fused_layers`` layers, for runners that take
    # these states in the place of features; None for none
    fusion: Tensor | None = None
    fusion_bias: Tensor | None = None  # [H]; None for none
    fused_layers: int = 0  # number of these layers
    # norms of these states, one after another, of equal parts of a row (EAGLE 3.1); the compiled kernels fuse none then
    state_norms: Sequence[Sequence[NormWeight]] = ()
    # whether ``fusion`` [H, 2H] makes the residual stream from [norm(embedding), norm(features)] (MTP, 2412.19437;
    # EAGLE-1, 2401.15077)
    fuses_embedding: bool = False
    fusion_norms: tuple[NormWeight, NormWeight] | None = None
