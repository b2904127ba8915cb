"""The weights of a head's decoder layers, by Llama's and Qwen3's names, as runners take them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foretoken.models.formats.quantize import Matrix, Quantizer
from foretoken.models.formats.weights import DenseMlpWeights, LayerWeights, NormWeight, SelfAttentionWeights


def layer_weights(
    tensors: Mapping[str, Tensor], index: int, dtype: torch.dtype, quantizer: Quantizer | None = None
) -> LayerWeights:
    """Returns the weights of layer ``index``; their shapes were checked when the head was read."""

    def matrix(name: str) -> Matrix:
        weight = tensors[f"{name}.weight"]
        return weight.to(dtype) if quantizer is None else quantizer(weight)

    at = f"layers.{index}."
    qkv = [f"{at}self_attn.{part}_proj" for part in "qkv"]
    biased = all(f"{name}.bias" in tensors for name in qkv)
    attention = SelfAttentionWeights(
        qkv=tuple(matrix(name) for name in qkv),
        qkv_bias=torch.cat([tensors[f"{name}.bias"] for name in qkv]).to(dtype) if biased else None,
        q_norm=norm_weight(tensors, f"{at}self_attn.q_norm"),
        k_norm=norm_weight(tensors, f"{at}self_attn.k_norm"),
        out=matrix(f"{at}self_attn.o_proj"),
        out_bias=None,
    )
    mlp = DenseMlpWeights(
        up=tuple(matrix(f"{at}mlp.{part}_proj") for part in ("gate", "up")),
        up_bias=None,
        down=matrix(f"{at}mlp.down_proj"),
        down_bias=None,
    )
    return LayerWeights(
        norm=norm_weight(tensors, f"{at}input_layernorm"),
        attention=attention,
        after_mixer=None,
        mlp_norm=norm_weight(tensors, f"{at}post_attention_layernorm"),
        mlp=mlp,
        after_mlp=None,
    )


def norm_weight(tensors: Mapping[str, Tensor], name: str) -> NormWeight | None:
    """Returns a norm without a bias; None if there is none of this name."""
    weight = tensors.get(f"{name}.weight")
    return None if weight is None else NormWeight(weight.float())
