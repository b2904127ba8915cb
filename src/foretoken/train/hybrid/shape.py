"""Sizes of a hybrid mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from foretoken.core.errors import InvalidRequest

MODEL_TYPE = "qwen3_5_moe_text"

OPTIONS = {
    "hidden_size": "--hidden",
    "num_hidden_layers": "--layers",
    "num_attention_heads": "--heads",
    "num_key_value_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "linear_num_key_heads": "--linear-key-heads",
    "linear_num_value_heads": "--linear-value-heads",
    "linear_head_dim": "--linear-head-dim",
    "num_experts": "--experts",
    "num_experts_per_tok": "--experts-per-token",
    "moe_intermediate_size": "--units",
    "shared_expert_intermediate_size": "--shared-units",
    "max_position_embeddings": "--positions",
}
"""Command line option of each size."""


@dataclass(frozen=True)
class HybridShape:
    """Size of a model of Qwen3.5's layout. The defaults are the bundled one's, about 7 M parameters.

    Args:
        hidden_size: Width of the residual stream.
        num_hidden_layers: Layers. Every fourth has attention, the others gated DeltaNet.
        num_attention_heads: Heads of queries.
        num_key_value_heads: Heads of keys and values.
        head_dim: Width of a head of attention.
        linear_num_key_heads: Heads of keys of gated DeltaNet.
        linear_num_value_heads: Heads of values of gated DeltaNet, each of which has a state.
        linear_head_dim: Width of keys and values of gated DeltaNet.
        num_experts: Experts of a layer.
        num_experts_per_tok: Experts that a token is routed to.
        moe_intermediate_size: Units of an expert.
        shared_expert_intermediate_size: Units of the expert that every token takes.
        max_position_embeddings: Positions.
    """

    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 32
    shared_expert_intermediate_size: int = 128
    max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InvalidRequest(f"{name} is {value}; it must be at least 1")
        for heads, keys in (
            (self.num_attention_heads, self.num_key_value_heads),
            (self.linear_num_value_heads, self.linear_num_key_heads),
        ):
            if heads % keys:
                raise InvalidRequest(f"{heads} heads do not divide among {keys} key heads")
        if self.head_dim % 8:
            raise InvalidRequest(f"head_dim is {self.head_dim}; a quarter of it is rotated, so it must divide by 8")
        if self.num_experts_per_tok > self.num_experts:
            raise InvalidRequest(f"there are {self.num_experts} experts, fewer than {self.num_experts_per_tok} a token")

    @staticmethod
    def of(config: Mapping[str, Any]) -> HybridShape:
        """Returns the size of a model with this config.json."""
        sizes = {**config, "linear_head_dim": config["linear_key_head_dim"]}
        return HybridShape(**{field.name: sizes[field.name] for field in fields(HybridShape)})

    def arguments(self, usual: HybridShape) -> str:
        """Returns the command line options for fields that differ from ``usual``."""
        changed = ((option, getattr(self, n), getattr(usual, n)) for n, option in OPTIONS.items())
        return " ".join(f"{option} {own}" for option, own, others in changed if own != others)

    @property
    def layer_types(self) -> list[str]:
        """Returns what mixes the tokens of each layer."""
        return ["linear_attention" if (n + 1) % 4 else "full_attention" for n in range(self.num_hidden_layers)]

    def config(self, vocab: int, end: int) -> dict[str, Any]:
        """Returns config.json of a model with ``vocab`` tokens, of which ``end`` ends a text and pads batches."""
        sizes = dict(vars(self))
        width = sizes.pop("linear_head_dim")
        return {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": MODEL_TYPE,
            **sizes,
            "linear_key_head_dim": width,
            "linear_value_head_dim": width,
            "linear_conv_kernel_dim": 4,
            "layer_types": self.layer_types,
            "vocab_size": vocab,
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
            "attention_bias": False,
            "attn_output_gate": True,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": end,
            "dtype": "bfloat16",
        }
