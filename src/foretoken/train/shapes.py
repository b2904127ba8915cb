"""Sizes of the models that are trained from scratch or widened, as groups of command line options (see ``config``)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from foretoken.core.checks import check_groups, named
from foretoken.core.errors import InvalidRequest
from foretoken.train.config import Settings

HYBRID_TYPE = "qwen3_5_moe_text"
"""``model_type`` of hybrid mixtures of experts."""


@dataclass(frozen=True)
class ModelShape(Settings):
    """Sizes of a model that is trained from scratch, under the names of its config.json."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        return cls(**{f.name: config[f.name] for f in fields(cls)})


@dataclass(frozen=True)
class LlamaShape(ModelShape):
    """Sizes of a Llama. The defaults are the bundled target's, about 14.6 M parameters.

    Args:
        hidden_size: Width of the residual stream.
        intermediate_size: Units of the MLP.
        num_hidden_layers: Layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key-value heads.
        head_dim: Width of a head.
        max_position_embeddings: Positions.
    """

    hidden_size: int = named("--hidden", 384)
    intermediate_size: int = named("--intermediate", 1024)
    num_hidden_layers: int = named("--layers", 8)
    num_attention_heads: int = named("--heads", 6)
    num_key_value_heads: int = named("--kv-heads", 3)
    head_dim: int = 64
    max_position_embeddings: int = named("--positions", 8192)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.num_attention_heads, self.num_key_value_heads)
        if self.head_dim % 2:
            raise InvalidRequest(f"head_dim is {self.head_dim}; rotary positions need an even one")


TARGET_SHAPE = LlamaShape()
DRAFT_SHAPE = LlamaShape(128, 384, 2, 4, 4, 32)


@dataclass(frozen=True)
class T5Shape(ModelShape):
    """Sizes of a T5. The defaults are the bundled target's, about 8.4 M parameters.

    Args:
        d_model: Width of the residual stream.
        d_ff: Units of the MLP.
        num_layers: Layers of the encoder.
        num_decoder_layers: Layers of the decoder.
        num_heads: Attention heads.
        d_kv: Width of a head.
    """

    d_model: int = named("--hidden", 256)
    d_ff: int = named("--intermediate", 512)
    num_layers: int = named("--layers", 4)
    num_decoder_layers: int = named("--decoder-layers", 4)
    num_heads: int = named("--heads", 8)
    d_kv: int = named("--head-dim", 32)


SEQ2SEQ_SHAPE = T5Shape()
SEQ2SEQ_DRAFT_SHAPE = T5Shape(96, 192, 2, 2, 4, 32)


@dataclass(frozen=True)
class HybridShape(ModelShape):
    """Sizes of a hybrid of Qwen3.5's layout. The defaults are the bundled one's, about 7 M parameters.

    Args:
        hidden_size: Width of the residual stream.
        num_hidden_layers: Layers. Every fourth has attention, the others gated DeltaNet.
        num_attention_heads: Query heads of attention.
        num_key_value_heads: Key-value heads of attention.
        head_dim: Width of a head of attention.
        linear_num_key_heads: Key heads of gated DeltaNet.
        linear_num_value_heads: Value heads of gated DeltaNet, each of which has a state.
        linear_head_dim: Width of keys and values of gated DeltaNet.
        num_experts: Experts of a layer.
        num_experts_per_tok: Experts that a token is routed to.
        moe_intermediate_size: Units of an expert.
        shared_expert_intermediate_size: Units of the expert that every token is routed to.
        max_position_embeddings: Positions.
    """

    hidden_size: int = named("--hidden", 256)
    num_hidden_layers: int = named("--layers", 8)
    num_attention_heads: int = named("--heads", 4)
    num_key_value_heads: int = named("--kv-heads", 2)
    head_dim: int = 64
    linear_num_key_heads: int = named("--linear-key-heads", 2)
    linear_num_value_heads: int = named("--linear-value-heads", 4)
    linear_head_dim: int = 64
    num_experts: int = named("--experts", 16)
    num_experts_per_tok: int = named("--experts-per-token", 4)
    moe_intermediate_size: int = named("--units", 32)
    shared_expert_intermediate_size: int = named("--shared-units", 128)
    max_position_embeddings: int = named("--positions", 8192)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.num_attention_heads, self.num_key_value_heads)
        check_groups(self.linear_num_value_heads, self.linear_num_key_heads)
        if self.head_dim % 8:
            raise InvalidRequest(f"head_dim is {self.head_dim}; a quarter of it is rotated, so it must divide by 8")
        if self.num_experts_per_tok > self.num_experts:
            raise InvalidRequest(f"there are {self.num_experts} experts, fewer than {self.num_experts_per_tok} a token")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        return super().of({**config, "linear_head_dim": config["linear_key_head_dim"]})

    @property
    def layer_types(self) -> list[str]:
        return ["linear_attention" if (n + 1) % 4 else "full_attention" for n in range(self.num_hidden_layers)]

    def config(self, vocab: int, end: int) -> dict[str, Any]:
        """Returns config.json of a model with ``vocab`` tokens. ``end`` is the end-of-text and padding token."""
        sizes = dict(vars(self))
        width = sizes.pop("linear_head_dim")
        return {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": HYBRID_TYPE,
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
