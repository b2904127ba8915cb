"""Schemas of config.json for the families that our runtime computes: Llama and its relatives, T5 and BART."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from foretoken.core.schema import MAX_ATTENTION_HEADS, Epsilon, Heads, Layers, NotNegative, Positive, Schema, Size

Share = Annotated[float, Field(gt=0, le=1)]
Base = Annotated[float, Field(ge=1, le=1e30)]
_Letters = Annotated[str, Field(pattern="^[LG]+$", max_length=10_000)]
Pattern = Annotated[int, Field(ge=0, le=10_000)] | _Letters
Buckets = Annotated[int, Field(ge=4, le=65_536)]
Taps = Annotated[int, Field(ge=1, le=8)]  # rows that a convolution reads
Distance = Annotated[int, Field(ge=1, le=2**20)]


class LayerRope(Schema):
    """One set of rotary settings. The types that our runtime computes must be complete."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Base | None = None
    partial_rotary_factor: Share | None = None
    factor: Positive | None = None
    factors: list[Positive] | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: NotNegative | None = None
    mscale_all_dim: NotNegative | None = None
    truncate: bool | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    alpha: Positive | None = None
    llama_4_scaling_beta: NotNegative | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        kind = self.rope_type or self.type
        bands = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        needed = {
            "linear": ("factor",),
            "factors": ("factors",),
            "llama3": ("factor", *bands),
            "longrope": ("short_factor", "long_factor"),
        }.get(kind or "", ())
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"lacks {name!r}, which the rotary type {kind!r} needs")
        if kind == "llama3" and (self.low_freq_factor or 0) > (self.high_freq_factor or 0):
            raise ValueError("has a low_freq_factor above its high_freq_factor")
        return self


class Rope(LayerRope):
    """Rotary settings: one set for all layers, or one for each kind of layer."""

    full_attention: LayerRope | None = None
    sliding_attention: LayerRope | None = None


class MptAttention(Schema):
    """The ``attn_config`` of MPT."""

    attn_type: str | None = None
    alibi: bool | None = None
    alibi_bias_max: Annotated[int, Field(ge=1, le=64)] | None = None
    clip_qkv: NotNegative | None = None
    softmax_scale: Positive | None = None
    qk_ln: bool | None = None
    prefix_lm: bool | None = None


class LayerSizes(Schema):
    """Sizes of one layer of Gemma 4."""

    head_dim: Heads | None = None
    num_key_value_heads: Heads | None = None


class CausalConfig(Schema):
    """The fields of a decoder's config.json that our runtime reads, by Llama's names, with the family's defaults."""

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
    sliding_window_pattern: Pattern | None = None
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    no_rope_layers: list[Annotated[int, Field(ge=0, le=1)]] | None = None
    no_rope_layer_interval: Layers = 4
    attention_chunk_size: Size | None = None
    intermediate_size_mlp: Size | None = None
    attn_temperature_tuning: bool | Annotated[int, Field(ge=0)] | None = None  # older files have 4 for true
    floor_scale: Size | None = None
    attn_scale: NotNegative | None = None
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: NotNegative | None = None
    final_logit_softcapping: NotNegative | None = None
    tie_word_embeddings: bool | None = None
    use_bidirectional_attention: bool | str | None = None
    embedding_multiplier: Positive | None = None
    residual_multiplier: Positive | None = None
    attention_multiplier: Positive | None = None
    logits_scaling: Positive | None = None
    logit_scale: Positive | None = None
    clip_qkv: NotNegative | None = None
    use_qk_norm: bool | None = None
    qk_layernorm: bool | None = None
    use_post_norm: bool | None = None
    use_parallel_residual: bool | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: Share | None = None
    # of Gemma 4
    per_layer_config: dict[Annotated[str, Field(pattern=r"^\d{1,6}$")], LayerSizes] | None = None
    global_head_dim: Heads | None = None
    num_global_key_value_heads: Heads | None = None
    attention_k_eq_v: bool | None = None
    num_kv_shared_layers: Annotated[int, Field(ge=0)] | None = None
    use_double_wide_mlp: bool | None = None
    hidden_size_per_layer_input: Annotated[int, Field(ge=0, le=65_536)] | None = None
    vocab_size_per_layer_input: Size | None = None
    enable_moe_block: bool | None = None
    top_k_experts: Size | None = None
    # of latent attention
    kv_lora_rank: Heads | None = None
    q_lora_rank: Size | None = None
    qk_nope_head_dim: Heads | None = None
    qk_rope_head_dim: Heads | None = None
    v_head_dim: Heads | None = None
    rope_interleave: bool | None = None
    scale_emb: Positive | None = None
    scale_depth: Positive | None = None
    dim_model_base: Size | None = None
    rope_theta: Base | None = None
    rope_local_base_freq: Base | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    # of models with recurrent layers
    num_experts: Annotated[int, Field(ge=0)] | None = None
    full_attention_interval: Layers | None = None
    linear_conv_kernel_dim: Taps | None = None
    linear_key_head_dim: Heads | None = None
    linear_value_head_dim: Heads | None = None
    linear_num_key_heads: Heads | None = None
    linear_num_value_heads: Heads | None = None
    conv_L_cache: Taps | None = None
    mamba_n_heads: Heads | None = None
    mamba_n_groups: Heads | None = None
    mamba_d_state: Heads | None = None
    mamba_d_conv: Taps | None = None
    mamba_expand: Annotated[int, Field(ge=1, le=16)] | None = None
    mamba_d_ssm: Size | None = None
    mamba_head_dim: Heads | None = None
    mamba_rms_norm: bool | None = None
    mamba_norm_before_gate: bool | None = None
    mamba_hidden_act: str | None = None
    shared_intermediate_size: Annotated[int, Field(ge=0)] | None = None
    moe_latent_size: Size | None = None
    lm_head_multiplier: Positive | None = None
    key_multiplier: Positive | None = None
    attention_in_multiplier: Positive | None = None
    attention_out_multiplier: Positive | None = None
    ssm_in_multiplier: Positive | None = None
    ssm_out_multiplier: Positive | None = None
    ssm_multipliers: Annotated[list[Positive], Field(min_length=5, max_length=5)] | None = None
    mlp_multipliers: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None = None
    attn_layer_indices: list[Annotated[int, Field(ge=0)]] | None = None
    time_step_limit: Annotated[list[Any], Field(min_length=2, max_length=2)] | None = None  # a number may be infinite
    block_multiple_of: Size | None = None
    block_ffn_dim_multiplier: Positive | None = None
    block_auto_adjust_ff_dim: bool | None = None
    block_ff_dim: Size | None = None
    tie_embedding: bool | None = None
    full_attn_idxs: list[Annotated[int, Field(ge=0)]] | None = None
    # of GPT-2 and its relatives
    rotary_dim: Size | None = None
    scale_attn_weights: bool | None = None
    scale_attn_by_inverse_layer_idx: bool | None = None
    add_cross_attention: bool | None = None
    multi_query: bool | None = None
    attention_types: list[list[list[str] | Layers]] | None = None
    # of OPT and BioGPT
    do_layer_norm_before: bool | None = None
    remove_final_layer_norm: bool | None = None
    word_embed_proj_dim: Size | None = None
    scale_embedding: bool | None = None
    # of Falcon, BLOOM and MPT
    num_kv_heads: Heads | None = None
    new_decoder_architecture: bool | None = None
    parallel_attn: bool | None = None
    num_ln_in_parallel_attn: Annotated[int, Field(ge=1, le=2)] | None = None
    alibi: bool | None = None
    apply_residual_connection_post_layernorm: bool | None = None
    attn_config: MptAttention | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        inner = self.mamba_d_ssm or (self.mamba_expand or 1) * self.hidden_size
        if self.mamba_head_dim:
            inner = self.mamba_head_dim * (self.mamba_n_heads or 1)
        for name, part, total in (
            ("mamba_n_heads", self.mamba_n_heads, inner),
            ("mamba_n_groups", self.mamba_n_groups, self.mamba_n_heads),
        ):
            if part and total and total % part:
                raise ValueError(f"has {name} = {part}, which should divide {total}")
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if keys and values and values % keys:
            raise ValueError(
                f"has linear_num_value_heads = {values}, which should be a multiple of linear_num_key_heads = {keys}"
            )
        layers, heads = self.num_hidden_layers, self.num_attention_heads
        for name in ("layer_types", "no_rope_layers"):
            listed = getattr(self, name)
            if listed and len(listed) != layers:
                raise ValueError(f"has {len(listed)} entries in {name}, which should be num_hidden_layers = {layers}")
        if self.attention_types is not None and _listed_layers(self.attention_types) != layers:
            raise ValueError(f"has attention_types that do not make num_layers = {layers} layers")
        if heads % (self.num_key_value_heads or heads):
            raise ValueError(
                f"has num_attention_heads = {heads}, which should be a multiple of num_key_value_heads = "
                f"{self.num_key_value_heads}"
            )
        head_dim = self.head_dim or self.hidden_size // heads
        if head_dim % 2 or not 2 <= head_dim <= MAX_ATTENTION_HEADS:
            raise ValueError(
                f"has heads of width {head_dim} (head_dim, or hidden_size / num_attention_heads), which should be "
                f"even and from 2 to {MAX_ATTENTION_HEADS}"
            )
        return self


def _listed_layers(groups: list[list[list[str] | int]]) -> int:
    """Returns the number of layers that GPT-Neo's ``attention_types`` list; 0 if they are malformed."""
    count = 0
    for group in groups:
        match group:
            case [list(kinds), int(times)]:
                count += len(kinds) * times
            case _:
                return 0
    return count


class T5Config(Schema):
    """The fields of a T5, mT5 or umT5's config.json that our runtime reads."""

    model_type: str
    vocab_size: Size
    d_model: Size
    d_kv: Heads
    d_ff: Size
    num_layers: Layers
    num_heads: Heads
    num_decoder_layers: Layers | None = None
    n_positions: Size | None = None
    layer_norm_epsilon: Epsilon = 1e-6
    relative_attention_num_buckets: Buckets = 32
    relative_attention_max_distance: Distance = 128
    feed_forward_proj: str | None = None
    scale_decoder_outputs: bool = False
    tie_word_embeddings: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        exact, farthest = self.relative_attention_num_buckets // 2, self.relative_attention_max_distance
        if farthest <= exact:
            raise ValueError(
                f"has relative_attention_max_distance = {farthest}, which should be above half of "
                f"relative_attention_num_buckets = {self.relative_attention_num_buckets}"
            )
        return self


class BartConfig(Schema):
    """The fields of a BART or mBART's config.json that our runtime reads."""

    model_type: str
    vocab_size: Size
    d_model: Size
    encoder_layers: Layers
    decoder_layers: Layers
    encoder_attention_heads: Heads
    decoder_attention_heads: Heads
    encoder_ffn_dim: Size
    decoder_ffn_dim: Size
    max_position_embeddings: Size
    activation_function: str | None = None
    scale_embedding: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for side in ("encoder", "decoder"):
            heads = getattr(self, f"{side}_attention_heads")
            if self.d_model % heads:
                raise ValueError(
                    f"has d_model = {self.d_model}, which should be a multiple of {side}_attention_heads = {heads}"
                )
        return self
