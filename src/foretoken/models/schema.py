"""Schemas of a checkpoint's JSON files: what every config.json has in common, and decoders of the Llama family."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from foretoken.core.schema import (
    MAX_ATTENTION_HEADS,
    Epsilon,
    Heads,
    Layers,
    NotNegative,
    Positive,
    Schema,
    Size,
    TokenId,
    TokenIds,
)

Share = Annotated[float, Field(gt=0, le=1)]
Base = Annotated[float, Field(ge=1, le=1e30)]
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True}
# What transformers takes where config.json is silent. The keys are all families that our runtime computes.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096, "use_sliding_window": True},
    "phi3": {"use_sliding_window": True},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "smollm3": {"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
    "gemma": _GEMMA,
    "gemma2": _GEMMA
    | {
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "use_sliding_window": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA
    | {
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "use_sliding_window": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}


class GenerationSettings(Schema):
    """The ids that begin and end a text, from generation_config.json or config.json."""

    eos_token_id: TokenIds = Field(default_factory=list)
    bos_token_id: TokenId | None = None
    decoder_start_token_id: TokenId | None = None
    forced_bos_token_id: TokenId | None = None


class TokenizerSettings(Schema):
    """tokenizer_config.json: what chooses the tokenizer's class; transformers checks the rest."""

    tokenizer_class: str | None = None
    auto_map: dict[str, Any] | None = None


class ShardIndex(Schema):
    """model.safetensors.index.json: the file of each tensor."""

    weight_map: dict[str, str]


class CommonConfig(Schema):
    """The fields of any config.json that are read before the architecture is known."""

    model_type: str | None = None
    architectures: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    max_position_embeddings: Size | None = None
    num_hidden_layers: Layers | None = None
    num_layers: Layers | None = None
    num_decoder_layers: Layers | None = None
    n_layer: Layers | None = None
    n_layers: Layers | None = None
    encoder_layers: Layers | None = None
    decoder_layers: Layers | None = None
    text_config: CommonConfig | None = None


class LayerRope(Schema):
    """One set of rotary settings. Types that are computed here must be complete."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Base | None = None
    partial_rotary_factor: Share | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        kind = self.rope_type or self.type
        bands = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        needed = {"linear": ("factor",), "llama3": ("factor", *bands)}.get(kind or "", ())
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"lacks {name!r}, which the rotary type {kind!r} needs")
        if kind == "llama3" and (self.low_freq_factor or 0) >= (self.high_freq_factor or 0):
            raise ValueError("has a low_freq_factor that is not below high_freq_factor")
        return self


class Rope(LayerRope):
    """Rotary settings: one set, or one for each kind of layer."""

    full_attention: LayerRope | None = None
    sliding_attention: LayerRope | None = None


class CausalConfig(Schema):
    """A decoder of the Llama family; the fields that our runtime reads, with its family's defaults filled in."""

    model_type: str
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Heads | None = None
    max_position_embeddings: Size
    rms_norm_eps: Epsilon
    hidden_act: str | None = None
    hidden_activation: str | None = None
    layer_types: list[str] | None = None
    sliding_window: Annotated[int, Field(ge=0)] | None = None
    use_sliding_window: bool | None = None
    sliding_window_pattern: Layers = 6
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    no_rope_layers: list[Annotated[int, Field(ge=0, le=1)]] | None = None
    no_rope_layer_interval: Layers = 4
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: NotNegative | None = None
    final_logit_softcapping: NotNegative | None = None
    tie_word_embeddings: bool | None = None
    mlp_bias: bool | None = None
    use_bidirectional_attention: bool | str | None = None
    partial_rotary_factor: Share | None = None
    rope_theta: Base | None = None
    rope_local_base_freq: Base | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        layers, heads = self.num_hidden_layers, self.num_attention_heads
        for name in ("layer_types", "no_rope_layers"):
            listed = getattr(self, name)
            if listed and len(listed) != layers:
                raise ValueError(f"has {len(listed)} entries in {name}, which should be num_hidden_layers = {layers}")
        if heads % (self.num_key_value_heads or heads):
            raise ValueError(
                f"has num_attention_heads = {heads}, which should be a multiple of num_key_value_heads = "
                f"{self.num_key_value_heads}"
            )
        head_dim = self.head_dim or self.hidden_size // heads
        if head_dim % 2 or not 2 <= head_dim <= MAX_ATTENTION_HEADS:
            raise ValueError(
                f"has heads of {head_dim} numbers (head_dim, or hidden_size / num_attention_heads), which should be "
                f"even and from 2 to {MAX_ATTENTION_HEADS}"
            )
        return self
