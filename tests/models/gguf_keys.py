"""The keys that llama.cpp's converter writes for tiny checkpoints, by class of its ``conversion/*.py``."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Config = Mapping[str, Any]
Keys = Callable[[Any, Config], None]
_PLAIN = {  # keys of all architectures, by the names of their fields in config.json
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts", "moe_k"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
}


def field(config: Config, *names: str) -> Any:
    """Returns the first of these fields that is there."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def put(writer: Any, key: str, value: Any) -> None:
    """Writes one key of the architecture in its value's type; None is skipped."""
    if value is None:
        return
    name = f"{writer.arch}.{key}"
    writer.kv_data[0].pop(name, None)  # as the converter overwrites those of all architectures
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(name, value)


def named(**more: str) -> Keys:
    """Returns a function that writes fields of config.json under other names; "__" stands for "."."""

    def write(writer: Any, config: Config) -> None:
        for key, name in more.items():
            put(writer, key.replace("__", "."), config.get(name))

    return write


def put_all(writer: Any, config: Config, layers: int) -> None:
    """Writes the keys of all architectures."""
    put(writer, "block_count", layers)
    for key, names in _PLAIN.items():
        put(writer, key, field(config, *names))
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    put(writer, "rope.freq_base", full.get("rope_theta"))
    put(writer, "rope.freq_base_swa", rope.get("sliding_attention", {}).get("rope_theta"))
    if full.get("rope_type") == "yarn":
        put(writer, "rope.scaling.type", "yarn")
        put(writer, "rope.scaling.factor", full["factor"])
        put(writer, "rope.scaling.original_context_length", full["original_max_position_embeddings"])
        for name in ("attention_factor", "beta_fast", "beta_slow"):
            put(writer, f"rope.scaling.yarn_{name.replace('attention', 'attn')}", full.get(name))


def windows(writer: Any, config: Config) -> None:
    if config.get("sliding_window"):
        put(writer, "attention.sliding_window", config["sliding_window"])
        put(writer, "attention.sliding_window_pattern", [kind == "sliding_attention" for kind in config["layer_types"]])


def rotated(writer: Any, config: Config) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    part = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    put(writer, "rope.dimension_count", int(head_dim * part))


def moe(writer: Any, config: Config) -> None:
    put(writer, "expert_feed_forward_length", config.get("moe_intermediate_size"))
    put(writer, "expert_shared_feed_forward_length", config.get("shared_expert_intermediate_size"))
    put(writer, "expert_shared_count", field(config, "n_shared_experts", "num_shared_experts"))
    put(writer, "leading_dense_block_count", field(config, "first_k_dense_replace", "num_dense_layers"))
    put(writer, "expert_weights_scale", config.get("routed_scaling_factor"))
    put(writer, "expert_weights_norm", config.get("norm_topk_prob"))


def ernie(writer: Any, config: Config) -> None:
    put(writer, "interleave_moe_layer_step", config["moe_layer_interval"])
    put(writer, "leading_dense_block_count", config["moe_layer_start_index"])
    put(writer, "expert_shared_count", config["moe_num_shared_experts"])
    put(writer, "expert_shared_feed_forward_length", config["intermediate_size"] // config["num_key_value_heads"])


def sigmoid(writer: Any, config: Config) -> None:
    put(writer, "expert_gating_func", 2)


def delta(writer: Any, config: Config) -> None:
    rotated(writer, config)
    put(writer, "ssm.conv_kernel", config["linear_conv_kernel_dim"])
    put(writer, "ssm.state_size", config["linear_key_head_dim"])
    put(writer, "ssm.group_count", config["linear_num_key_heads"])
    put(writer, "ssm.time_step_rank", config["linear_num_value_heads"])
    put(writer, "ssm.inner_size", config["linear_value_head_dim"] * config["linear_num_value_heads"])
    put(writer, "attention.recurrent_layers", [kind == "linear_attention" for kind in config["layer_types"]])
    put(writer, "full_attention_interval", 4)


def llama4(writer: Any, config: Config) -> None:
    put(writer, "feed_forward_length", config["intermediate_size_mlp"])
    put(writer, "expert_feed_forward_length", config["intermediate_size"])
    put(writer, "interleave_moe_layer_step", config["interleave_moe_layer_step"])


def rope_factors(config: Config) -> list[tuple[str, Tensor]]:
    """The file's tensor of divisors of a Llama 3's or 4's rotary frequencies."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return []
    old, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for at in range(0, config["head_dim"], 2):
        length = 2 * math.pi * rope["rope_theta"] ** (at / config["head_dim"])
        if length < old / high:
            divisors.append(1.0)
        elif length > old / low:
            divisors.append(factor)
        else:
            smooth = (old / length - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return [("rope_freqs.weight", torch.tensor(divisors))]


def mamba(writer: Any, config: Config) -> None:
    heads, width = field(config, "mamba_n_heads", "mamba_num_heads"), field(config, "mamba_d_head", "mamba_head_dim")
    put(writer, "ssm.conv_kernel", field(config, "mamba_d_conv", "conv_kernel"))
    put(writer, "ssm.state_size", field(config, "mamba_d_state", "ssm_state_size"))
    put(writer, "ssm.group_count", field(config, "mamba_n_groups", "n_groups"))
    put(writer, "ssm.time_step_rank", heads)
    put(writer, "ssm.inner_size", config.get("mamba_d_ssm") or heads * width)
    put(writer, "context_length", 2**20)


def by_layer(writer: Any, config: Config) -> None:
    """Heads of keys in layers with attention alone."""
    kinds = field(config, "layer_types", "layers_block_type")
    heads = [config["num_key_value_heads"] if "attention" in k and "linear" not in k else 0 for k in kinds]
    put(writer, "attention.head_count_kv", heads)


def granite(writer: Any, config: Config) -> None:
    put(writer, "attention.scale", config["attention_multiplier"])
    put(writer, "embedding_scale", config["embedding_multiplier"])
    put(writer, "residual_scale", config["residual_multiplier"])
    put(writer, "logit_scale", config["logits_scaling"])
    put(writer, "expert_shared_feed_forward_length", config.get("shared_intermediate_size"))
    put(writer, "rope.scaling.finetuned", config.get("position_embedding_type", "rope") == "rope")


def latent(writer: Any, config: Config) -> None:
    put(writer, "attention.head_count_kv", 1)
    put(writer, "attention.q_lora_rank", config["q_lora_rank"])
    put(writer, "attention.kv_lora_rank", config["kv_lora_rank"])
    put(writer, "attention.key_length", config["kv_lora_rank"] + config["qk_rope_head_dim"])
    put(writer, "attention.value_length", config["kv_lora_rank"])
    put(writer, "attention.key_length_mla", config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    put(writer, "attention.value_length_mla", config["v_head_dim"])
    put(writer, "rope.dimension_count", config["qk_rope_head_dim"])
    put(writer, "expert_gating_func", None if config["model_type"] == "deepseek_v2" else 2)
    if every := config["rope_parameters"].get("mscale_all_dim"):
        put(writer, "rope.scaling.yarn_log_multiplier", 0.1 * every)


def minicpm3(writer: Any, config: Config) -> None:
    put(writer, "attention.q_lora_rank", config["q_lora_rank"])
    put(writer, "attention.kv_lora_rank", config["kv_lora_rank"])
    put(writer, "attention.key_length", config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    put(writer, "rope.dimension_count", config["qk_rope_head_dim"])


def gemma4(writer: Any, config: Config) -> None:
    windows(writer, config)
    full = [kind == "full_attention" for kind in config["layer_types"]]
    shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
    wide = inner * (1 + bool(config["use_double_wide_mlp"]))
    heads, own = config["num_key_value_heads"], config["num_global_key_value_heads"]
    own = own if config.get("attention_k_eq_v") else heads
    put(writer, "attention.shared_kv_layers", shared)
    put(writer, "embedding_length_per_layer_input", config["hidden_size_per_layer_input"])
    for name, key in (("global_head_dim", "{}"), ("head_dim", "{}_swa")):
        put(writer, "attention." + key.format("key_length"), config[name])
        put(writer, "attention." + key.format("value_length"), config[name])
        put(writer, "rope." + key.format("dimension_count"), config[name])
    put(writer, "feed_forward_length", [inner if i < len(full) - shared else wide for i in range(len(full))])
    put(writer, "attention.head_count_kv", [own if whole else heads for whole in full])
    put(writer, "final_logit_softcapping", config["final_logit_softcapping"])
    moe(writer, config)
    half = config["global_head_dim"] // 2
    turned = int(half * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (half - turned), np.float32))


def lfm2(writer: Any, config: Config) -> None:
    by_layer(writer, config)
    put(writer, "shortconv.l_cache", config["conv_L_cache"])
    if config.get("block_auto_adjust_ff_dim"):
        unit = config["block_multiple_of"]
        put(writer, "feed_forward_length", -(-int(2 * config["intermediate_size"] / 3) // unit) * unit)


def falcon(writer: Any, config: Config) -> None:
    put(writer, "feed_forward_length", 4 * config["hidden_size"])
    put(writer, "attention.head_count_kv", config["num_kv_heads"] if config["new_decoder_architecture"] else 1)
    put(writer, "context_length", 2048)


def wide(writer: Any, config: Config) -> None:
    put(writer, "feed_forward_length", 4 * field(config, "hidden_size", "n_embd", "d_model"))


def mpt(writer: Any, config: Config) -> None:
    wide(writer, config)
    put(writer, "attention.layer_norm_epsilon", 1e-5)
    put(writer, "attention.clamp_kqv", config["attn_config"]["clip_qkv"])
    put(writer, "attention.max_alibi_bias", float(config["attn_config"]["alibi_bias_max"]))


def longrope(writer: Any, config: Config) -> None:
    rope = config["rope_parameters"]
    put(writer, "rope.scaling.original_context_length", rope["original_max_position_embeddings"])
    original = rope["original_max_position_embeddings"]
    scale = config["max_position_embeddings"] / original
    put(writer, "rope.scaling.attn_factor", math.sqrt(1 + math.log(max(scale, 1.0)) / math.log(original)))
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def ministral3(writer: Any, config: Config) -> None:
    put(writer, "rope.scaling.yarn_log_multiplier", config["rope_parameters"]["mscale_all_dim"])
    put(writer, "attention.temperature_scale", config["rope_parameters"]["llama_4_scaling_beta"])
