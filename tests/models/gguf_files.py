"""Writes tiny checkpoints as GGUF files, with the changes that llama.cpp's converter makes."""

from __future__ import annotations

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
# By architecture of GGUF: model type of transformers, and the settings of one tiny model.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
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
}
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
        return random_blocks(kind, *weight.shape, seed)


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
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    reference = add_weights(writer, module, architecture, kinds)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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
        kind = kinds if isinstance(kinds, K) else next((kinds[k] for k in kinds if at.endswith(k)), K.F32)
        if tensor.ndim == 1:
            kind = K.F32
        raw = quantized(tensor, kind, seed)
        values = gguf.dequantize(raw, kind).reshape(tensor.shape)
        reference[name] = torch.from_numpy(values.copy())
        data = raw.view({K.F32: np.float32, K.F16: np.float16}.get(kind, np.uint8))
        if architecture in ("llama", "mistral", "smollm3") and (".attn_q." in at or ".attn_k." in at):
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
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
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
    """Returns what each rotary frequency is divided by (llama.cpp's converter, ``generate_extra_tensors``)."""
    size = SIZES["head_dim"]
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    length, low, high = (rope[n] for n in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    smooth = np.clip((length / (2 * np.pi / frequencies) - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _tensors(module: Any) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in module.named_parameters()]
