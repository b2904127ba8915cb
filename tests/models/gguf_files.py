"""Writes tiny checkpoints as GGUF files, with the changes that llama.cpp's converter makes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as K
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
# By architecture of GGUF: model type of transformers, and the settings of one tiny model. Files of Mixtral say "llama".
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen2moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 512}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": (
        "granitemoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.05,
            "logits_scaling": 2.0,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.2,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": YARN},
    ),
    "phi3": ("phi3", {"sliding_window": 8}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 64}),
    "gemma3": ("gemma3_text", {"sliding_window": 8, "query_pre_attn_scalar": 64, "num_hidden_layers": 7}),
}
# Bytes of a block's float16 numbers, which may not be infinite; all other bytes may have any value.
HALVES = {
    K.Q4_0: (0,),
    K.Q4_1: (0, 2),
    K.Q5_0: (0,),
    K.Q5_1: (0, 2),
    K.Q8_0: (0,),
    K.Q2_K: (80, 82),
    K.Q3_K: (108,),
    K.Q4_K: (0, 2),
    K.Q5_K: (0, 2),
    K.Q6_K: (208,),
    K.IQ4_NL: (0,),
    K.IQ4_XS: (0,),
    K.MXFP4: (),
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.up_proj": "ffn_up_exps",
    "block_sparse_moe.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def random_blocks(kind: K, rows: int, columns: int, seed: int = 0, scale: float = 1e-3) -> NDArray[np.uint8]:
    """Returns random bytes of a matrix in a quantized type, with finite scales."""
    random = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = (random.standard_normal((len(raw), 1)) * scale).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8)
    if kind == K.MXFP4:
        raw[:, 0] = random.integers(116, 122, len(raw))
    return raw.reshape(rows, -1)


def tiny_checkpoint(architecture: str, seed: int = 0, **more: Any) -> Any:
    """Returns a random transformers module of a GGUF architecture, in float32, with ``more`` settings."""
    kind, settings = FAMILIES[architecture]
    config = transformers.CONFIG_MAPPING[kind](**{**SIZES, "tie_word_embeddings": "gemma" in kind, **settings, **more})
    generator = torch.Generator().manual_seed(seed)
    module = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in module.named_parameters():
        spread = 0.1 if "norm" in name or "bias" in name else 0.05
        base = 1.0 if "norm" in name and "gemma" not in kind else 0.0
        parameter.data = base + spread * torch.randn(parameter.shape, generator=generator)
    return module


def quantized(weight: Tensor, kind: K, seed: int) -> NDArray[np.uint8]:
    """Returns a matrix in a type of GGUF; where the package cannot quantize, random blocks instead."""
    try:
        return np.ascontiguousarray(gguf.quantize(weight.numpy(), kind)).view(np.uint8)
    except NotImplementedError:
        return random_blocks(kind, weight[..., 0].numel(), weight.shape[-1], seed)


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_both(
    module: Any,
    architecture: str,
    folder: Path,
    kinds: Mapping[str, K] | K,
    more: Callable[[Any], None] = lambda writer: None,
) -> tuple[Path, Path]:
    """Writes a module as a GGUF file, and its dequantized weights as a float32 checkpoint.

    Args:
        module: the model.
        architecture: its name in GGUF.
        folder: where both are written.
        kinds: the type of all matrices, or by the name's end in GGUF; others are float32.
        more: writes further keys.

    Returns:
        The GGUF file and the folder of the checkpoint.
    """
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama" if architecture == "mixtral" else architecture)
    reference = add_weights(writer, module, architecture, kinds)
    more(writer)
    finish(writer)
    checkpoint = folder / "checkpoint"
    module.config.save_pretrained(checkpoint)
    save_file(reference, checkpoint / "model.safetensors")
    return folder / "model.gguf", checkpoint


def add_weights(writer: Any, module: Any, architecture: str, kinds: Mapping[str, K] | K) -> dict[str, Tensor]:
    """Adds the settings and tensors of a module to a GGUF file.

    Returns:
        The dequantized tensors by their names in the checkpoint.
    """
    write_settings(writer, module.config, architecture)
    reference = {}
    for seed, (name, tensor) in enumerate(_tensors(module)):
        at = gguf_name(name, "gemma2" in architecture or "gemma3" in architecture)
        if architecture == "gpt-oss":
            at = at.replace("ffn_norm", "post_attention_norm")
        kind = kinds if isinstance(kinds, K) else next((kinds[k] for k in kinds if at.endswith(k)), K.F32)
        if tensor.ndim == 1 or "ffn_gate_inp" in at or at.endswith("bias"):
            kind = K.F32
        raw = quantized(tensor, kind, seed)
        values = gguf.dequantize(raw, kind).reshape(tensor.shape)
        reference[name] = torch.from_numpy(values.copy())
        data = raw.view({K.F32: np.float32, K.F16: np.float16}.get(kind, np.uint8))
        if architecture in ("llama", "mistral", "smollm3", "mixtral", "granitemoe") and (
            ".attn_q." in at or ".attn_k." in at
        ):
            heads = module.config.num_attention_heads if ".attn_q." in at else module.config.num_key_value_heads
            data = interleaved(data, heads)
        if "gemma" in architecture and at.endswith("norm.weight"):
            data = data + np.float32(1)
        writer.add_tensor(at, data.reshape(*tensor.shape[:-1], -1), raw_dtype=None if kind in (K.F32, K.F16) else kind)
    return reference


def interleaved(data: NDArray[Any], heads: int) -> NDArray[Any]:
    """Returns rows as llama.cpp stores the queries and keys of Llama."""
    return data.reshape(heads, 2, data.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(data.shape)


def gguf_name(name: str, sandwich: bool) -> str:
    """Returns the name in GGUF of a checkpoint's tensor."""
    stem, _, suffix = name.rpartition(".")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    if name.endswith("sinks"):
        return f"blk.{layer}.attn_sinks.weight"
    names = _PARTS | _SANDWICH if sandwich else _PARTS
    return f"blk.{layer}.{names[part]}.{suffix}"


def write_settings(writer: Any, config: Any, architecture: str) -> None:
    """Writes the keys of an architecture, as llama.cpp's converter does."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    if "expert" in str(config.to_dict()):
        write_experts(writer, config)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if full["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(full))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            getattr(writer, f"add_{name}")(getattr(config, name))
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])


def llama3_factors(rope: Mapping[str, Any]) -> NDArray[np.float32]:
    """Returns the divisors of the rotary frequencies (llama.cpp's converter, ``generate_extra_tensors``)."""
    size = SIZES["head_dim"]
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    length, low, high = (rope[n] for n in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    smooth = np.clip((length / (2 * np.pi / frequencies) - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def write_experts(writer: Any, config: Any) -> None:
    """Writes the keys of a mixture of experts, as llama.cpp's converter does."""
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    if config.model_type == "granitemoe":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _tensors(module: Any) -> list[tuple[str, Tensor]]:
    """Returns a module's tensors, with gate, up and down of all experts as one tensor each."""
    result: list[tuple[str, Tensor]] = []
    oss = module.config.model_type == "gpt_oss"  # inputs come first, and rows of gate and up in turns
    for name, parameter in module.named_parameters():
        tensor = parameter.detach()
        if ".experts." not in name:
            result.append((name, tensor))
            continue
        at, part = name.rsplit(".", 1)
        suffix = "bias" if part.endswith("_bias") else "weight"
        part = part.removesuffix("_bias")
        if oss and suffix == "weight":
            tensor = tensor.transpose(1, 2)
        parts = {part: tensor}
        if part == "gate_up_proj":
            halves = (tensor[:, 0::2], tensor[:, 1::2]) if oss else tensor.chunk(2, 1)
            parts = dict(zip(("gate_proj", "up_proj"), halves, strict=True))
        result += [(f"{at}.{part}.{suffix}", one.contiguous()) for part, one in parts.items()]
    if module.config.model_type == "granitemoe":
        return [(_granite_name(name), tensor) for name, tensor in result]
    if module.config.model_type == "mixtral":
        return [(_mixtral_name(name), tensor) for name, tensor in result]
    return result


def _granite_name(name: str) -> str:
    """Returns the name that our reader has for a tensor of Granite's experts."""
    return name.replace("router.weight", "router.layer.weight").replace(
        "block_sparse_moe.experts.", "block_sparse_moe."
    )


def _mixtral_name(name: str) -> str:
    """Returns the name that Mixtral's checkpoints have for a tensor."""
    for part, own in _MIXTRAL.items():
        name = name.replace(f"mlp.experts.{part}", f"block_sparse_moe.experts.{own}")
    return name.replace("mlp.gate.", "block_sparse_moe.gate.")
