"""A checkpoint's tensors in the shape the runners take: one layer at a time, what belongs together fused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer, on the CPU. Matrices are [out, in] row-major in the model's dtype.

    Norm weights are float32 [n], Gemma's offset of 1 included; a norm is computed in float32 and rounded once.
    ``qkv`` holds the rows of queries, keys, values; ``gate_up`` those of gate, up.
    """

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_attention_norm: Tensor | None  # Gemma 2 and 3: on the attention's output, before it is added
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    post_mlp_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class Ends:
    """What lies before the first layer and after the last. ``head`` is the embedding itself where they are tied."""

    embedding: Tensor  # [V, H]
    norm: Tensor  # float32 [H]
    head: Tensor  # [V, H]


def read_layer(
    weights: Mapping[str, Tensor], architecture: Architecture, dtype: torch.dtype, index: int
) -> LayerWeights:
    """Layer ``index``. Raises ModelLoadError when a tensor is missing or has the wrong shape."""
    a, reader = architecture, _Reader(weights, architecture, dtype)
    at = f"model.layers.{index}"
    attention, mlp = f"{at}.self_attn", f"{at}.mlp"
    wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
    fused = f"{attention}.qkv_proj.weight" in weights
    qkv = (f"{attention}.qkv_proj",) if fused else tuple(f"{attention}.{p}_proj" for p in "qkv")
    fused = f"{mlp}.gate_up_proj.weight" in weights
    gate_up = (f"{mlp}.gate_up_proj",) if fused else (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    sandwich = a.family in ("gemma2", "gemma3_text")
    return LayerWeights(
        norm=reader.norm(f"{at}.input_layernorm", a.hidden),
        qkv=reader.matrix(qkv, wide + 2 * narrow, a.hidden),
        qkv_bias=reader.bias(qkv),
        q_norm=reader.norm(f"{attention}.q_norm", a.head_dim) if f"{attention}.q_norm.weight" in weights else None,
        k_norm=reader.norm(f"{attention}.k_norm", a.head_dim) if f"{attention}.k_norm.weight" in weights else None,
        out=reader.matrix((f"{attention}.o_proj",), a.hidden, wide),
        out_bias=reader.bias((f"{attention}.o_proj",)),
        post_attention_norm=reader.norm(f"{at}.post_attention_layernorm", a.hidden) if sandwich else None,
        mlp_norm=reader.norm(f"{at}.{'pre_feedforward' if sandwich else 'post_attention'}_layernorm", a.hidden),
        gate_up=reader.matrix(gate_up, 2 * a.intermediate, a.hidden),
        down=reader.matrix((f"{mlp}.down_proj",), a.hidden, a.intermediate),
        post_mlp_norm=reader.norm(f"{at}.post_feedforward_layernorm", a.hidden) if sandwich else None,
    )


def read_ends(weights: Mapping[str, Tensor], architecture: Architecture, dtype: torch.dtype) -> Ends:
    """Embedding, last norm and head."""
    a, reader = architecture, _Reader(weights, architecture, dtype)
    embedding = reader.matrix(("model.embed_tokens",), a.vocab, a.hidden)
    tied = a.tied or "lm_head.weight" not in weights
    return Ends(
        embedding=embedding,
        norm=reader.norm("model.norm", a.hidden),
        head=embedding if tied else reader.matrix(("lm_head",), a.vocab, a.hidden),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    weights: Mapping[str, Tensor]
    architecture: Architecture
    dtype: torch.dtype

    def matrix(self, names: tuple[str, ...], rows: int, columns: int) -> Tensor:
        """[rows, columns]: the weights of these products below one another."""
        parts = [self._get(f"{name}.weight") for name in names]
        if any(part.ndim != 2 for part in parts):
            raise ModelLoadError(f"the tensor {names[0] + '.weight'!r} is not a matrix; is the checkpoint damaged?")
        whole = torch.cat([part.to(self.dtype) for part in parts]) if len(parts) > 1 else parts[0].to(self.dtype)
        if whole.shape != (rows, columns):
            raise ModelLoadError(
                f"{' and '.join(names)} have the shape {tuple(whole.shape)}, but config.json says {(rows, columns)}"
            )
        return whole

    def bias(self, names: tuple[str, ...]) -> Tensor | None:
        """The biases of these products in one vector, None where they have none."""
        if not any(f"{name}.bias" in self.weights for name in names):
            return None
        return torch.cat([self._get(f"{name}.bias") for name in names]).to(self.dtype)

    def norm(self, name: str, size: int) -> Tensor:
        """float32 [size]; Gemma stores weights minus 1."""
        weight = self._get(f"{name}.weight").to(torch.float32, copy=True)
        if weight.shape != (size,):
            raise ModelLoadError(f"{name}.weight has the shape {tuple(weight.shape)}, but config.json says {(size,)}")
        return weight.add_(self.architecture.norm_offset)

    def _get(self, name: str) -> Tensor:
        try:
            return self.weights[name]
        except KeyError:
            raise ModelLoadError(f"the checkpoint lacks the tensor {name!r}; is it complete?") from None
