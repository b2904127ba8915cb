"""Tiny random checkpoints of every tested architecture."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foretoken.core.native.build import SWITCH, KernelsUnavailable
from foretoken.models.runners.native.build import Kind, library

VOCAB = 101
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**COMMON, "num_key_value_heads": 2}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ALTERNATING = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Tiny:
    """One architecture: the prefix of its transformers classes and its config."""

    family: str
    config: dict[str, Any]
    native: bool = False  # computed by our own decoder
    eager: bool = False  # soft-capped attention, which sdpa would ignore
    torch: bool = True  # also computed by torch operators, where it is native

    @property
    def mixture(self) -> bool:
        """Whether layers have experts."""
        return any("experts" in name for name in self.config)

    def build(self) -> Any:
        """A fresh random float32 module, the same every time."""
        torch.manual_seed(hash_of(self.family))
        config = getattr(transformers, f"{self.family}Config")(**self.config)
        attention = "eager" if self.eager else None
        module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.ndim == 1 or name.endswith(
                    "_bias"
                ):  # norms and biases that are left at 1 and 0 would hide mistakes
                    parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name else 0.1))
                elif "conv" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
            for name, buffer in module.named_buffers():
                if "correction" in name or "expert_bias" in name:
                    buffer.add_(torch.randn_like(buffer) * 0.1)
        return module.float().eval()

    def save(self, path: Path) -> Path:
        self.build().save_pretrained(path)
        return path


@contextmanager
def only_runner(name: str) -> Iterator[None]:
    """Decoders built inside run on "torch" operators, or on the "compiled" kernels, which must be there."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "torch":
            patch.setenv(SWITCH, "0")
        elif name == "compiled":
            try:
                library([Kind.FLOAT32], Kind.FLOAT32)
            except KernelsUnavailable as reason:
                pytest.skip(f"no compiled kernels here: {reason}")
        yield


def hash_of(name: str) -> int:
    return sum(ord(letter) * 31**i for i, letter in enumerate(name)) % 2**31


GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OPT: dict[str, Any] = {
    **{k: v for k, v in COMMON.items() if k not in ("intermediate_size", "initializer_range", "pad_token_id")},
    "ffn_dim": 48,
    "word_embed_proj_dim": 64,
    "init_std": 0.2,
    "pad_token_id": 1,
}
FALCON: dict[str, Any] = {
    **{k: v for k, v in COMMON.items() if k != "intermediate_size"},
    "alibi": False,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
}
GEMMA: dict[str, Any] = {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 24}
CAPPED: dict[str, Any] = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}
TWO_ROPES: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
LINEAR_FIRST = ["linear_attention", "full_attention"]
FEW_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
QWEN_HYBRID: dict[str, Any] = {
    **GROUPED,
    "rms_norm_eps": 1e-2,  # the norm of small outputs would magnify the rounding of transformers' own float32
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {**GROUPED, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
MAMBA: dict[str, Any] = {
    **GROUPED,
    "initializer_range": 0.1,  # larger states would magnify the rounding of transformers' own float32
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_proj_bias": True,
    "mamba_chunk_size": 16,  # transformers pads prompts to it, and computes a matrix of its size for each head
}
FALCON_H1: dict[str, Any] = {
    **MAMBA,
    "num_hidden_layers": 2,
    "mamba_d_ssm": 64,
    "projectors_bias": True,
    "mlp_bias": True,
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "mlp_multipliers": [0.7, 0.6],
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.9, 0.8, 1.2, 1.1, 0.7],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
}
NEMOTRON_H: dict[str, Any] = {
    **{k: v for k, v in GROUPED.items() if k != "num_hidden_layers"},
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "mlp"],
    "head_dim": 32,
    "layer_norm_epsilon": 1e-2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 1e-9,  # transformers bounds steps in prompts alone
    "use_bias": True,
    "mlp_bias": True,
    "n_routed_experts": 6,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 1.8,
}
LATENT: dict[str, Any] = {
    **COMMON,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LATENT_YARN: dict[str, Any] = {**YARN, "mscale": 0.9, "mscale_all_dim": 0.7}
LLAMA4: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 40,
    "intermediate_size_mlp": 56,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_layers": [1, 3],
    "no_rope_layers": [1, 1, 1, 0],
    "attention_chunk_size": 7,
    "floor_scale": 4,
    "attn_scale": 0.5,
    "rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0},  # as in Llama 4 Scout
}

ARCHITECTURES: dict[str, Tiny] = {
    "llama": Tiny("Llama", {**GROUPED, "rope_parameters": LLAMA3_ROPE}, native=True),
    "llama-tied": Tiny("Llama", {**COMMON, "tie_word_embeddings": True, "head_dim": 32}, native=True),
    "mistral": Tiny("Mistral", {**GROUPED, "sliding_window": 6}, native=True),
    "qwen2": Tiny("Qwen2", GROUPED, native=True),
    "qwen2-sliding": Tiny(
        "Qwen2", {**GROUPED, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, native=True
    ),
    "qwen3": Tiny("Qwen3", {**GROUPED, "head_dim": 32}, native=True),
    "phi3": Tiny("Phi3", {**GROUPED, "sliding_window": 6}, native=True),
    "smollm3": Tiny("SmolLM3", {**GROUPED, "no_rope_layers": [1, 0]}, native=True),
    "gemma": Tiny("Gemma", {k: v for k, v in GEMMA.items() if k != "query_pre_attn_scalar"}, native=True),
    "gemma2": Tiny(
        "Gemma2", {**GEMMA, **CAPPED, "sliding_window": 6, "layer_types": ALTERNATING}, native=True, eager=True
    ),
    "gemma3": Tiny(
        "Gemma3Text",
        {**GEMMA, "sliding_window": 6, "layer_types": ALTERNATING, "rope_parameters": TWO_ROPES},
        native=True,
    ),
    "qwen3.5": Tiny(
        "Qwen3_5Text",
        {
            **QWEN_HYBRID,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
        native=True,
        torch=False,
    ),
    "qwen3.5-linear-last": Tiny(
        "Qwen3_5Text",
        {**QWEN_HYBRID, "linear_value_head_dim": 16, "layer_types": ["full_attention", "linear_attention"]},
        native=True,
        torch=False,
    ),
    "qwen3-next": Tiny(
        "Qwen3Next",
        {**QWEN_HYBRID, "num_experts": 0, "shared_expert_intermediate_size": 1, "layer_types": LINEAR_FIRST},
        native=True,
        torch=False,
    ),
    "qwen3-next-experts": Tiny(
        "Qwen3Next",
        {**QWEN_HYBRID, **FEW_EXPERTS, "linear_value_head_dim": 16, "layer_types": LINEAR_FIRST},
        native=True,
        torch=False,
    ),
    "qwen3.5-experts": Tiny(
        "Qwen3_5MoeText",
        {
            **{k: v for k, v in QWEN_HYBRID.items() if k != "intermediate_size"},
            **FEW_EXPERTS,
            "layer_types": LINEAR_FIRST,
        },
        native=True,
        torch=False,
    ),
    "bamba": Tiny("Bamba", {**MAMBA, "attn_layer_indices": [1]}, native=True, torch=False),
    "granite-hybrid": Tiny(
        "GraniteMoeHybrid",
        {
            **MAMBA,
            **GRANITE,
            "num_local_experts": 6,
            "shared_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        native=True,
        torch=False,
    ),
    "granite-hybrid-dense": Tiny(
        "GraniteMoeHybrid",
        {
            **MAMBA,
            **GRANITE,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 72,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
        native=True,
        torch=False,
    ),
    "falcon-h1": Tiny(
        "FalconH1", {**FALCON_H1, "mamba_rms_norm": False, "attention_bias": True}, native=True, torch=False
    ),
    "falcon-h1-norms": Tiny(
        "FalconH1",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None},
        native=True,
        torch=False,
    ),
    "nemotron-h": Tiny("NemotronH", NEMOTRON_H, native=True, torch=False),
    "lfm2": Tiny(
        "Lfm2",
        {**GROUPED, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
        native=True,
        torch=False,
    ),
    "lfm2-moe": Tiny(
        "Lfm2Moe",
        {
            **EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.3,
            "tie_word_embeddings": False,
        },
        native=True,
        torch=False,
    ),
    "qwen3-moe": Tiny(
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True},
        native=True,
    ),
    "qwen2-moe": Tiny("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 72}, native=True),
    "mixtral": Tiny("Mixtral", {**GROUPED, "num_local_experts": 5, "sliding_window": 6}, native=True),
    "olmoe": Tiny("Olmoe", {**GROUPED, "num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 1.5}, native=True),
    "granitemoe": Tiny(
        "GraniteMoe", {**GROUPED, **GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2}, native=True
    ),
    "granitemoeshared": Tiny(
        "GraniteMoeShared", {**GROUPED, **GRANITE, "num_local_experts": 6, "shared_intermediate_size": 40}, native=True
    ),
    "deepseek-v2": Tiny(
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
        },
        native=True,
    ),
    "deepseek-v3": Tiny(
        "DeepseekV3", {**LATENT, "rope_parameters": LATENT_YARN, "routed_scaling_factor": 1.8}, native=True
    ),
    "glm4-moe-lite": Tiny("Glm4MoeLite", {**LATENT, "mlp_layer_types": ["sparse", "dense"]}, native=True),
    "llama4": Tiny("Llama4Text", LLAMA4, native=True),
    "gpt-oss": Tiny(
        "GptOss",
        {
            **GROUPED,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "swiglu_limit": 1.5,
            "sliding_window": 6,
            "rope_parameters": YARN,
        },
        native=True,
        eager=True,
    ),
    "glm4-moe": Tiny(
        "Glm4Moe",
        {
            **GROUPED,
            "head_dim": 32,
            "moe_intermediate_size": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.8,
            "n_group": 4,
            "topk_group": 2,
        },
        native=True,
    ),
    "ernie4-5-moe": Tiny(
        "Ernie4_5_Moe",
        {
            **GROUPED,
            "head_dim": 32,
            "moe_intermediate_size": 40,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
            "num_hidden_layers": 3,
            "moe_layer_end_index": 1,
        },
        native=True,
    ),
    "hy-v3": Tiny("HYV3", {**EXPERTS, "head_dim": 32, "num_hidden_layers": 3}, native=True),
    "exaone-moe": Tiny(
        "ExaoneMoe",
        {
            **GROUPED,
            "head_dim": 32,
            "moe_intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "routed_scaling_factor": 1.8,
            "n_group": 4,
            "topk_group": 2,
        },
        native=True,
    ),
    "gpt2": Tiny("GPT2", GPT2),
    "gpt-neox": Tiny("GPTNeoX", COMMON),
    "opt": Tiny("OPT", OPT),
    "phi": Tiny("Phi", COMMON),
    "falcon": Tiny("Falcon", FALCON),
    "falcon-new": Tiny("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
}
