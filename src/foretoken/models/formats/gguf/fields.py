"""Fields of config.json that only some architectures have, read from the keys and tensors of a GGUF file.

Each function returns fields by Llama's names, or by a family's names if Llama lacks the field.
"""

from collections.abc import Callable
from typing import Any

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import shortened
from foretoken.models.families.family import FULL, SLIDING
from foretoken.models.families.recurrence import CONVOLUTION, LINEAR
from foretoken.models.formats.gguf.cursor import StoredArray
from foretoken.models.formats.gguf.metadata import Metadata

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_UNTURNED = 1e29  # Gemma 4's pairs that are not turned have frequencies divided by more than this


def positions(m: Metadata) -> dict[str, Any]:
    """Returns the base, the rotated fraction of a head, and the scaling if there is any."""
    rotated = m.get("rope.dimension_count", default=m.head_dim)
    scaling = _scaling(m, rotated)
    return {
        "rope_theta": m.number("rope.freq_base") or 10000.0,
        "partial_rotary_factor": rotated / m.head_dim,
        "rope_local_base_freq": m.number("rope.freq_base_swa"),
    } | ({"rope_scaling": scaling} if scaling else {})


def _scaling(m: Metadata, rotated: int) -> dict[str, Any] | None:
    """Returns the rotary scaling of the file; None if it has none."""
    kind = m.get("rope.scaling.type", (str,), "none")
    factors = m.floats(ROPE_FACTORS, rotated // 2)
    long, short = m.floats(LONG_FACTORS, rotated // 2), m.floats(SHORT_FACTORS, rotated // 2)
    if long is not None and short is not None:
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": m.get("rope.scaling.original_context_length")
            or m.need("context_length"),
            "attention_factor": m.number("rope.scaling.attn_factor"),
        }
    if kind == "linear" and factors is None:
        return {"rope_type": "linear", "factor": m.number("rope.scaling.factor") or 1.0}
    if kind == "yarn" and factors is None:
        return _yarn(m)
    if kind != "none":
        raise ModelLoadError(f"{m.header.path} scales its positions by {shortened(kind)}, which is not computed here")
    return None if factors is None else {"rope_type": "factors", "factors": factors}


def _yarn(m: Metadata) -> dict[str, Any]:
    """Returns the settings of YaRN (2309.00071). llama.cpp rounds its bounds, except in gpt-oss."""
    keys = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    settings = {name: m.number(f"rope.scaling.{key}") for name, key in keys.items()}
    every = m.number("rope.scaling.yarn_log_multiplier")
    if every is not None and m.architecture == "deepseek2":
        every = round(every / 0.1, 6)  # the file stores a tenth of config.json's value
    if m.architecture == "mistral3" and (beta := m.number("attention.temperature_scale")):
        settings["llama_4_scaling_beta"] = beta  # of Ministral 3: queries grow with their position
    factors = {"mscale": every if m.architecture == "deepseek2" else 1.0, "mscale_all_dim": every} if every else {}
    return {
        "rope_type": "yarn",
        "factor": m.number("rope.scaling.factor") or 1.0,
        "original_max_position_embeddings": m.need("rope.scaling.original_context_length"),
        "truncate": m.architecture != "gpt-oss",
        **{name: value for name, value in settings.items() if value is not None},
        **factors,
    }


def rotated_fraction(m: Metadata, head_dim: int) -> float:
    """Returns the fraction of a head's pairs that Gemma 4 rotates in layers with full attention.

    The file has a factor for each pair of a head, which is enormous for pairs that are not rotated.
    """
    factors = m.floats(ROPE_FACTORS, head_dim // 2)
    if factors is None:
        return 1.0
    return sum(factor < _UNTURNED for factor in factors) / len(factors)


Fields = Callable[[Metadata], dict[str, Any]]

_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose scale follows from hidden / heads
_MAX_ALIBI = 64
_MAVERICK_EXPERTS = 128  # experts of the Llama 4 without norms of queries and keys
_SOFTMAX, _SIGMOID = 1, 2  # values of expert_gating_func


def windows(m: Metadata) -> dict[str, Any]:
    """Returns the length of attention windows, and the layers that have one if the file lists them."""
    fields: dict[str, Any] = {"sliding_window": m.get("attention.sliding_window") or None}
    key = "attention.sliding_window_pattern"
    if isinstance(m.header.metadata.get(f"{m.architecture}.{key}"), StoredArray):
        kinds = [SLIDING if slides else FULL for slides in m.by_layer(key)]
        return fields | {"layer_types": kinds}
    return fields | {"sliding_window_pattern": m.get(key)}


def caps(m: Metadata) -> dict[str, Any]:
    """Returns the bounds of scores and logits. Without a key they are transformers' defaults, as in llama.cpp."""
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {name: value for name in names if (value := m.number(name)) is not None}


def gemma2(m: Metadata) -> dict[str, Any]:
    layers, heads = m.layers, m.need("attention.head_count")
    big = layers == _GEMMA_27B[m.architecture]
    scalar = m.need("embedding_length") / heads if big else m.head_dim
    fields = windows(m) | caps(m) | {"query_pre_attn_scalar": scalar}
    return {name: value for name, value in fields.items() if value is not None}


def gemma3(m: Metadata) -> dict[str, Any]:
    fields = {"attn_logit_softcapping": None, "final_logit_softcapping": None} | gemma2(m)
    return fields | {"rope_local_base_freq": m.number("rope.freq_base_swa") or 1e4}


def gemma4(m: Metadata) -> dict[str, Any]:
    """Returns the fields of Gemma 4, whose layers with full attention have heads of their own."""
    kinds = [SLIDING if slides else FULL for slides in m.need_by_layer("attention.sliding_window_pattern")]
    kv_heads, inner = m.need_by_layer("attention.head_count_kv"), m.need_by_layer("feed_forward_length")
    wide, narrow = m.head_dim, m.need("attention.key_length_swa")
    full = [layer for layer, kind in enumerate(kinds) if kind == FULL]
    full_sizes = {str(layer): {"head_dim": wide, "num_key_value_heads": kv_heads[layer]} for layer in full}
    slides = [heads for heads, kind in zip(kv_heads, kinds, strict=True) if kind == SLIDING]
    sliding_rope = {"rope_type": "default", "rope_theta": m.number("rope.freq_base_swa") or 1e4}
    full_rope = {
        "rope_type": "proportional",
        "rope_theta": m.number("rope.freq_base") or 1e6,
        "partial_rotary_factor": rotated_fraction(m, wide),
    }
    return caps(m) | {
        "head_dim": narrow,
        "num_key_value_heads": slides[0] if slides else kv_heads[0],
        "per_layer_config": full_sizes,
        "sliding_window": m.get("attention.sliding_window"),
        "layer_types": kinds,
        "intermediate_size": min(inner),
        "use_double_wide_mlp": max(inner) > min(inner),
        "num_kv_shared_layers": m.get("attention.shared_kv_layers", default=0),
        "attention_k_eq_v": any(m.has("attn_k.weight", layer) and not m.has("attn_v.weight", layer) for layer in full),
        "hidden_size_per_layer_input": m.get("embedding_length_per_layer_input", default=0),
        "vocab_size_per_layer_input": m.header.tensors["token_embd.weight"].shape[0],
        "rope_parameters": {FULL: full_rope, SLIDING: sliding_rope},
        "rope_scaling": None,
        "partial_rotary_factor": None,
        "enable_moe_block": bool(m.get("expert_count")),
        "num_experts": m.get("expert_count"),
        "top_k_experts": m.get("expert_used_count"),
        "moe_intermediate_size": m.get("expert_feed_forward_length"),
    }


def experts(normalized: bool) -> Fields:
    """Returns a function for the fields of experts; ``normalized``: llama.cpp's value for the architecture."""

    def fields(m: Metadata) -> dict[str, Any]:
        count = m.get("expert_count", default=0)
        if not count:
            return {"num_experts": 0}
        dense = m.get("leading_dense_block_count", default=_leading_dense(m))
        return {
            "num_experts": count,
            "num_experts_per_tok": m.need("expert_used_count"),
            "moe_intermediate_size": m.get("expert_feed_forward_length") or max(m.need_by_layer("feed_forward_length")),
            "shared_expert_intermediate_size": m.get("expert_shared_feed_forward_length", default=0) or None,
            "n_shared_experts": m.get("expert_shared_count"),
            "norm_topk_prob": m.get("expert_weights_norm", (bool,), normalized),
            "routed_scaling_factor": m.number("expert_weights_scale") or 1.0,
            "n_group": m.get("expert_group_count", default=0) or 1,
            "topk_group": m.get("expert_group_used_count", default=0) or 1,
            "interleave_moe_layer_step": m.get("interleave_moe_layer_step"),
            "first_k_dense_replace": dense,
            "num_dense_layers": dense,
        }

    return fields


def _leading_dense(m: Metadata) -> int:
    """Returns the number of layers before the first one with experts, by their tensors."""
    return next((layer for layer in range(m.layers) if m.has("ffn_gate_inp.weight", layer)), 0)


def ernie(m: Metadata) -> dict[str, Any]:
    """Returns the fields of ERNIE 4.5's experts. The width of the shared one is wrong in files, so it is derived."""
    return experts(True)(m) | {"shared_expert_intermediate_size": None}


def by_sigmoid(m: Metadata) -> dict[str, Any]:
    """Returns no fields. Raises ModelLoadError for a file whose experts are not scored by a sigmoid."""
    _check_scoring(m, _SIGMOID)
    return {}


def _check_scoring(m: Metadata, kind: int) -> None:
    """Raises ModelLoadError for a file that names another kind of expert_gating_func."""
    if (scoring := m.get("expert_gating_func", default=kind)) != kind:
        raise ModelLoadError(
            f"{m.header.path} has {m.architecture}.expert_gating_func = {scoring}; of this architecture {kind} is "
            "computed here"
        )


def factors(m: Metadata) -> dict[str, Any]:
    """Returns the factors of Granite, and the width of its shared MLP."""
    shared = m.get("expert_shared_feed_forward_length", default=0)
    return {
        "attention_multiplier": m.number("attention.scale") or m.head_dim**-0.5,
        "embedding_multiplier": m.number("embedding_scale") or 1.0,
        "residual_multiplier": m.number("residual_scale") or 1.0,
        "logits_scaling": m.number("logit_scale") or 1.0,
        "shared_intermediate_size": shared or max(m.need_by_layer("feed_forward_length")),
    }


def granitemoe(m: Metadata) -> dict[str, Any]:
    """Returns the fields of Granite's mixtures; some have a shared expert."""
    shared = m.get("expert_shared_feed_forward_length", default=0)
    fields = factors(m) | experts(True)(m)
    return fields | ({"model_type": "granitemoeshared"} if shared else {"shared_intermediate_size": None})


def granitehybrid(m: Metadata) -> dict[str, Any]:
    """Returns the fields of Granite 4 and Bamba; layers without heads of keys are recurrent."""
    kinds = [FULL if heads else LINEAR for heads in m.need_by_layer("attention.head_count_kv")]
    rotary = m.get("rope.scaling.finetuned", (bool,), True)
    return (
        factors(m)
        | experts(True)(m)
        | mamba(m)
        | {"layer_types": kinds, "position_embedding_type": "rope" if rotary else "nope"}
    )


def llama4(m: Metadata) -> dict[str, Any]:
    """Returns the fields of Llama 4. llama.cpp knows one setting of chunks and of growing queries, and stores none."""
    if m.header.metadata.get(f"{m.architecture}.attention.sliding_window") == 0 or not m.need("expert_count"):
        raise ModelLoadError(
            f"{m.header.path} has no chunks of attention or no experts (MobileLLM), which is not computed here"
        )
    return experts(False)(m) | {
        "intermediate_size_mlp": max(m.need_by_layer("feed_forward_length")),
        "use_qk_norm": m.need("expert_count") != _MAVERICK_EXPERTS,
    }


def mamba(m: Metadata) -> dict[str, Any]:
    inner, heads = m.need("ssm.inner_size"), m.need("ssm.time_step_rank")
    return {
        "mamba_d_conv": m.need("ssm.conv_kernel"),
        "mamba_d_state": m.need("ssm.state_size"),
        "mamba_n_groups": m.need("ssm.group_count"),
        "mamba_n_heads": heads,
        "mamba_d_ssm": inner,
        "mamba_head_dim": inner // max(heads, 1),
    }


def falcon_h1(m: Metadata) -> dict[str, Any]:
    """Returns the fields of Falcon-H1, whose factors llama.cpp's converter multiplies into the weights."""
    norms = {"mamba_rms_norm": m.has("ssm_norm.weight"), "mamba_norm_before_gate": False}
    return mamba(m) | norms | {"factors_in_weights": True}


def nemotron_h(m: Metadata) -> dict[str, Any]:
    """Returns the fields of Nemotron-H, whose layers are each a mixer or an MLP alone, as their tensors show."""
    marks = {
        "ssm_in.weight": LINEAR,
        "attn_q.weight": FULL,
        "attn_qkv.weight": FULL,
        "ffn_gate_inp.weight": "moe",
        "ffn_up.weight": "mlp",
    }
    kinds = [next((kind for part, kind in marks.items() if m.has(part, layer)), LINEAR) for layer in range(m.layers)]
    fields = mamba(m) | experts(True)(m) | {"layer_types": kinds}
    if "mlp" not in kinds:
        return fields
    return fields | {"intermediate_size": m.header.tensors[f"blk.{kinds.index('mlp')}.ffn_up.weight"].shape[0]}


def delta(m: Metadata) -> dict[str, Any]:
    """Returns the sizes of gated DeltaNet, and the layers that have it."""
    inner, heads = m.need("ssm.inner_size"), m.need("ssm.time_step_rank")
    every = m.get("full_attention_interval", default=4)
    listed = m.by_layer("attention.recurrent_layers") or [(layer + 1) % max(every, 1) for layer in range(m.layers)]
    return {
        "layer_types": [LINEAR if recurrent else FULL for recurrent in listed],
        "linear_conv_kernel_dim": m.need("ssm.conv_kernel"),
        "linear_key_head_dim": m.need("ssm.state_size"),
        "linear_num_key_heads": m.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // max(heads, 1),
    }


def lfm2(m: Metadata) -> dict[str, Any]:
    """Returns the fields of LFM2; layers without heads of keys are short convolutions."""
    kinds = [FULL if heads else CONVOLUTION for heads in m.need_by_layer("attention.head_count_kv")]
    return {"layer_types": kinds, "conv_L_cache": m.need("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}


def deepseek(m: Metadata) -> dict[str, Any]:
    """Returns the fields of DeepSeek-V2 and its relatives, distinguished by their scoring of experts.

    Sizes of keys and values are those of the latent. Separate keys hold a head's sizes; older files lack them.
    """
    rank, rotated = m.need("attention.kv_lora_rank"), m.need("rope.dimension_count")
    plain = m.get("attention.key_length_mla") or m.need("attention.key_length")
    usual = m.need("embedding_length") // max(m.need("attention.head_count"), 1)
    fields = experts(False)(m) | {
        "kv_lora_rank": rank,
        "q_lora_rank": m.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": plain - rotated,
        "v_head_dim": m.get("attention.value_length_mla") or m.get("attention.value_length", default=usual),
        "head_dim": None,
        "num_key_value_heads": None,
        "partial_rotary_factor": None,
    }
    lite = m.layers in (47, 48) and m.header.tensors["token_embd.weight"].shape[0] == 154880  # GLM-4.7-Flash
    if m.get("expert_gating_func", default=_SIGMOID if lite else _SOFTMAX) == _SIGMOID or not fields["num_experts"]:
        return fields
    grouped = "group_limited_greedy" if fields["n_group"] > 1 else "greedy"
    _check_scoring(m, _SOFTMAX)
    return fields | {"model_type": "deepseek_v2", "topk_method": grouped}


def olmo2(m: Metadata) -> dict[str, Any]:
    """Returns the fields of OLMo 2, or of OLMo 3, which has windows."""
    fields = windows(m)
    return fields | {"model_type": "olmo3"} if fields["sliding_window"] else {}


def clip(m: Metadata) -> dict[str, Any]:
    """Returns the bound of queries, keys and values."""
    return {"clip_qkv": m.number("attention.clamp_kqv")}


def mpt(m: Metadata) -> dict[str, Any]:
    bias = m.number("attention.max_alibi_bias") or 0.0
    if not 0 <= bias <= _MAX_ALIBI:
        raise m.wrong("attention.max_alibi_bias", bias, f"0 to {_MAX_ALIBI}")
    return {"attn_config": clip(m) | {"alibi": bias > 0, "alibi_bias_max": int(bias) or 8}}


def logit_scale(m: Metadata) -> dict[str, Any]:
    return {"logit_scale": m.number("logit_scale") or 1.0}


def normed_heads(m: Metadata) -> dict[str, Any]:
    """Returns whether queries and keys are normed: whether the file has weights for it."""
    normed = any(name.endswith(".attn_q_norm.weight") for name in m.header.tensors)
    return {"use_qk_norm": normed, "qk_layernorm": normed}


def residual(m: Metadata) -> dict[str, Any]:
    """Returns whether attention and MLP read the same input."""
    return {"use_parallel_residual": m.get("use_parallel_residual", (bool,), True)}


def falcon(m: Metadata) -> dict[str, Any]:
    """Returns the fields of Falcon, whose larger models have several heads of keys, and two norms or one."""
    several = (m.get("attention.head_count_kv") or 1) > 1
    return {
        "new_decoder_architecture": several,
        "num_kv_heads": m.get("attention.head_count_kv") or 1,
        "multi_query": True,
        "num_ln_in_parallel_attn": 2 if m.has("attn_norm_2.weight") else 1,
    }


def bigcode(m: Metadata) -> dict[str, Any]:
    """Returns whether all heads share one head of keys (StarCoder 1)."""
    return {"multi_query": m.get("attention.head_count_kv", default=1) == 1}


def ministral3(m: Metadata) -> dict[str, Any]:
    """Returns the family of files whose queries grow with their position."""
    yarn = m.get("rope.scaling.type", (str,)) == "yarn"
    return {"model_type": "ministral3"} if yarn and m.number("attention.temperature_scale") else {}
