"""A decoder's weights as the runners take them: one layer at a time, with projections of the same input fused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.finite import converted
from foretoken.models.formats.memory import give_back, reuse_freed
from foretoken.models.formats.quantize import Matrix, Quantizer
from foretoken.models.formats.reader import TensorReader


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
    """The weights of a layer's attention. ``qkv`` holds the rows of queries, keys and values.

    Norms of heads are [head_dim] for all heads, or [heads * head_dim].
    """

    qkv: tuple[Matrix, ...]
    qkv_bias: Tensor | None
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    out: Matrix
    out_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DenseMlpWeights:
    """The weights of a layer's MLP. ``up`` holds the rows of gate and up, or of up alone if it is not gated."""

    up: tuple[Matrix, ...]
    up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer, on the CPU: of its mixer, its MLP, and the norms around them.

    Matrices are [out, in] row-major in the model's dtype, or quantized. A matrix may be a view of a mapped file, so
    runners copy or pack it; the mapping ends with it. Weights of norms include Gemma's offset of 1. A product of
    several matrices has as many parts as the checkpoint stores, all of one kind.
    """

    norm: NormWeight | None
    mixer: SelfAttentionWeights
    after_mixer: NormWeight | None
    mlp_norm: NormWeight | None
    mlp: DenseMlpWeights
    after_mlp: NormWeight | None


@dataclass(frozen=True, slots=True)
class Ends:
    """Embedding, last norm and vocabulary head. ``head`` is the embedding itself if the two are tied."""

    embedding: Matrix  # [V, H]; floats or grouped
    norm: NormWeight | None
    head: Matrix  # [V, H]


@dataclass(frozen=True, slots=True)
class Entry:
    """The input side of a model whose residual stream starts from features instead of embeddings.

    Attributes:
        joined: whether the input of the first attention is [norm(embedding), norm(features)], so that its ``qkv`` is
            [out, 2H] (EAGLE-3, 2503.01840); otherwise embeddings are not used.
        norm: the norm on the features.
        norm_first: whether the residual stream starts from the normed features.
    """

    joined: bool = False
    norm: NormWeight | None = None
    norm_first: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint's tensors with the dtype to convert them to. quantize: how float matrices are quantized."""

    weights: Mapping[str, Tensor]
    architecture: Architecture
    dtype: torch.dtype
    quantize: Quantizer | None = None

    @property
    def reader(self) -> TensorReader:
        """Reads the tensors by name."""
        return TensorReader(self.weights, self.dtype, self.quantize, self.architecture.norm_offset)


@dataclass(frozen=True, slots=True)
class Layers:
    """Iterates over all layers. Each is read when the iteration reaches it; another iteration reads it again."""

    source: Source

    def __iter__(self) -> Iterator[LayerWeights]:
        reuse_freed()
        for index in range(self.source.architecture.layers):
            yield read_layer(self.source, index)
            give_back()


def read_layer(source: Source, index: int) -> LayerWeights:
    """Reads layer ``index``. Raises ModelLoadError if a tensor is missing or has the wrong shape."""
    a, reader = source.architecture, source.reader
    at, norms = f"model.layers.{index}", a.stack[index].norms
    sandwich = norms.after_mlp

    def norm(name: str, exists: bool = True) -> NormWeight | None:
        return NormWeight(reader.norm(f"{at}.{name}_layernorm", a.hidden)) if exists else None

    return LayerWeights(
        norm=norm("input", norms.mixer),
        mixer=_attention(a, reader, f"{at}.self_attn"),
        after_mixer=norm("post_attention", norms.after_mixer),
        mlp_norm=norm("pre_feedforward" if sandwich else "post_attention", norms.mlp),
        mlp=_mlp(a, reader, f"{at}.mlp"),
        after_mlp=norm("post_feedforward", norms.after_mlp),
    )


def _attention(a: Architecture, reader: TensorReader, at: str) -> SelfAttentionWeights:
    wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
    qkv = (f"{at}.qkv_proj",) if a.family == "phi3" else tuple(f"{at}.{part}_proj" for part in "qkv")
    heads = a.family in ("qwen3", "gemma3_text")
    return SelfAttentionWeights(
        qkv=reader.parts(qkv, wide + 2 * narrow, a.hidden),
        qkv_bias=reader.bias(qkv, wide + 2 * narrow),
        q_norm=NormWeight(reader.norm(f"{at}.q_norm", a.head_dim)) if heads else None,
        k_norm=NormWeight(reader.norm(f"{at}.k_norm", a.head_dim)) if heads else None,
        out=reader.matrix(f"{at}.o_proj", a.hidden, wide),
        out_bias=reader.bias((f"{at}.o_proj",), a.hidden),
    )


def _mlp(a: Architecture, reader: TensorReader, at: str) -> DenseMlpWeights:
    up = (f"{at}.gate_up_proj",) if a.family == "phi3" else (f"{at}.gate_proj", f"{at}.up_proj")
    return DenseMlpWeights(
        up=reader.parts(up, 2 * a.intermediate, a.hidden),
        up_bias=None,
        down=reader.matrix(f"{at}.down_proj", a.hidden, a.intermediate),
        down_bias=None,
    )


def read_ends(source: Source) -> Ends:
    """Reads embedding, last norm and head. Raises ModelLoadError if a tensor is missing or has the wrong shape."""
    a, reader = source.architecture, source.reader
    stored: Matrix = reader.grouped("model.embed_tokens") or reader.get("model.embed_tokens.weight")
    reader.check((stored,), ("model.embed_tokens",), a.vocab, a.hidden)
    embedding = stored
    if isinstance(stored, Tensor):
        embedding = converted("model.embed_tokens.weight", stored, source.dtype, copy=True)
    head = embedding
    if not a.tied and ("lm_head.weight" in source.weights or "lm_head._weight_qdata" in source.weights):
        head = reader.matrix("lm_head", a.vocab, a.hidden)
    elif source.quantize is not None and isinstance(stored, Tensor):
        head = source.quantize(stored)
    return Ends(embedding, NormWeight(reader.norm("model.norm", a.hidden)), head)
