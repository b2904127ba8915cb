"""A tiny random checkpoint of every dense family beside Llama's nearest relatives, which are in ``tiny.py``."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

VOCAB = 101
TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PLAIN: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GROUPED: dict[str, Any] = {**PLAIN, "num_key_value_heads": 2}
FOUR: dict[str, Any] = {**GROUPED, "num_hidden_layers": 4, "sliding_window": 6}  # every fourth layer sees all
FALCON: dict[str, Any] = {key: value for key, value in PLAIN.items() if key != "intermediate_size"}
GPT2: dict[str, Any] = {**TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
PLAIN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
GEMMA4: dict[str, Any] = {
    **GROUPED,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 6,
    "final_logit_softcapping": 4.0,
}
MULTIPLIERS: dict[str, Any] = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
# By name: the model type, and its config.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", {**GROUPED, "head_dim": 16, "rope_parameters": YARN, "mlp_bias": True}),
    "biogpt": ("biogpt", PLAIN),
    "bloom": ("bloom", {**TOKENS, "hidden_size": 96, "n_layer": 2, "n_head": 6}),
    "cohere": ("cohere", {**GROUPED, "use_qk_norm": True, "logit_scale": 0.3}),
    "cohere, biases": ("cohere", {**GROUPED, "attention_bias": True}),
    "cohere2": ("cohere2", FOUR),
    "cwm": ("cwm", {**FOUR, "head_dim": 32}),
    "ernie4_5": ("ernie4_5", {**GROUPED, "head_dim": 32, "use_bias": True}),
    "exaone4": ("exaone4", FOUR),
    "exaone4, no windows": ("exaone4", {**GROUPED, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "falcon, one head of keys": ("falcon", {**FALCON, "multi_query": True, "bias": True}),
    "falcon, two norms": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, one norm": (
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon, alibi": ("falcon", {**FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}),
    "gemma4": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "gemma4, one matrix for keys and values": (
        "gemma4_text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma4, experts": (
        "gemma4_text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4_unified": ("gemma4_unified_text", {**GEMMA4, "attention_k_eq_v": True}),
    "glm": ("glm", {**GROUPED, "head_dim": 32}),
    "glm4": ("glm4", {**GROUPED, "head_dim": 32}),
    "gpt2": ("gpt2", GPT2),
    "gpt_bigcode": ("gpt_bigcode", GPT2),
    "gpt_bigcode, many heads of keys": ("gpt_bigcode", {**GPT2, "multi_query": False}),
    "gpt_neo": (
        "gpt_neo",
        {
            **{key: value for key, value in PLAIN.items() if key not in ("num_hidden_layers", "num_attention_heads")},
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 6,
        },
    ),
    "gpt_neox": ("gpt_neox", {**PLAIN, "hidden_size": 256}),
    "gpt_neox, sequential": ("gpt_neox", {**PLAIN, "hidden_size": 256, "use_parallel_residual": False}),
    "gptj": ("gptj", {**GPT2, "rotary_dim": 8}),
    "granite": ("granite", {**GROUPED, **MULTIPLIERS, "logits_scaling": 2.0, "attention_bias": True, "mlp_bias": True}),
    "helium": ("helium", {**GROUPED, "head_dim": 16}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {
            **GROUPED,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "hyperclovax": ("hyperclovax", {**GROUPED, **MULTIPLIERS, "logits_scaling": 0.5, "head_dim": 32}),
    "internlm3": ("internlm3", {**GROUPED, "head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("iquestcoder", {**GROUPED, "head_dim": 16}),
    "jais2": ("jais2", {**GROUPED, "head_dim": 16}),
    "llama, yarn and biases": ("llama", {**GROUPED, "rope_parameters": YARN, "mlp_bias": True, "attention_bias": True}),
    "llama, dynamic": (
        "llama",
        {**GROUPED, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama, 48 heads of queries": (
        "llama",
        {**GROUPED, "hidden_size": 96, "num_attention_heads": 48, "num_key_value_heads": 1, "head_dim": 16},
    ),
    "ministral": (
        "ministral",
        {**GROUPED, "sliding_window": 6, "head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "ministral3": (
        "ministral3",
        {
            **GROUPED,
            "head_dim": 32,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
                "llama_4_scaling_beta": 0.3,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "minicpm3": ("minicpm3", {**PLAIN, **LATENT, "scale_depth": 1.1, "dim_model_base": 32, "rope_parameters": YARN}),
    "youtu": (  # transformers zeroes the row of the padding token when it loads the module
        "youtu",
        {**PLAIN, **LATENT, "rope_interleave": False, "attention_bias": True, "pad_token_id": None},
    ),
    "mpt": ("mpt", {**TOKENS, "d_model": 96, "n_layers": 2, "n_heads": 6, "attn_config": {"clip_qkv": 1.0}}),
    "nanochat": ("nanochat", GROUPED),
    "nemotron": ("nemotron", {**GROUPED, "head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "olmo": ("olmo", {**GROUPED, "clip_qkv": 1.0}),
    "olmo2": ("olmo2", GROUPED),
    "olmo3": ("olmo3", {**FOUR, "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN_ROPE}}),
    "opt": ("opt", {**FALCON, "ffn_dim": 48, "word_embed_proj_dim": 64, "pad_token_id": 1}),
    "persimmon": ("persimmon", PLAIN),
    "phi": ("phi", {**GROUPED, "qk_layernorm": True}),
    "phi, no norms of heads": ("phi", GROUPED),
    "phi3, longrope": ("phi3", {**GROUPED, "rope_parameters": LONG}),
    "phi3, partial": (
        "phi3",
        {**GROUPED, "hidden_size": 128, "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5}},
    ),
    "seed_oss": ("seed_oss", {**GROUPED, "head_dim": 32, "attention_out_bias": True, "mlp_bias": True}),
    "stablelm": ("stablelm", {**GROUPED, "hidden_size": 256, "qk_layernorm": True, "use_qkv_bias": True}),
    "stablelm, parallel": ("stablelm", {**GROUPED, "hidden_size": 256, "use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {**GROUPED, "sliding_window": 6}),
    "vaultgemma": (
        "vaultgemma",
        {**FOUR, "head_dim": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},
    ),
}


def module(name: str, **changes: Any) -> Any:
    """A random float32 module of a case, the same every time. No weight of a norm is 1, and no bias 0."""
    family, config = CASES[name]
    config = {**config, **changes}
    torch.manual_seed(sum(map(ord, name)))
    attention = "eager" if "attn_logit_softcapping" in config else None
    built = transformers.AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**config), attn_implementation=attention
    )
    with torch.no_grad():
        for part, buffer in built.named_buffers():
            if part.endswith("layer_scalar"):
                buffer.fill_(0.8)
        for part, parameter in built.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1 or "norm" in part:
                parameter.add_(noise * 0.2)
            else:
                parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)
    return built.float().eval()


def saved(name: str, folder: Path) -> Any:
    """Saves the module of a case. Returns it as transformers loads it."""
    built = module(name)
    built.save_pretrained(folder)
    implementation = built.config._attn_implementation
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=implementation
    ).eval()
